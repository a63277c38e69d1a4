"""Decode steps of a range of layers in Triton: rows in if it has no embedding, rows out if it has no head.

Runs in Triton's interpreter; on a GPU as CUDA graphs.
"""

from functools import cache

import pytest
import torch
from helpers.kernels.gpus import interpreted, on_gpu
from helpers.models.engines import error, prompt, shallow, vanilla
from helpers.models.layer_ranges import CutModel
from helpers.sweeps import sweep, swept
from torch import Tensor
from transformers import PreTrainedModel

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.step import StepInput
from labkit.kernels.gpu import FEW_ROWS
from labkit.stages import Phase, Stage, message

SAME = 1e-4  # of the range of the logits, compared with transformers in float32
PAST, STEPS = 5, 3
NAMES = ("gpt2", "gptj", "bloom", "opt-post-norm", "mistral")  # see test_ranges.py


def texts(rows: int) -> tuple[Tensor, Tensor]:
    """Texts of unequal lengths, and the mask of their padding."""
    ids = prompt(rows, PAST + STEPS)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return ids.where(mask.bool(), 0), mask


@cache
def expected(model: PreTrainedModel, rows: int) -> Tensor:
    """Logits after the prompt and after each token that follows."""
    ids, mask = texts(rows)
    placed = {} if model.config.model_type == "bloom" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        return model(ids, attention_mask=mask, **placed).logits[:, PAST - 1 :]


def begun(model: CutModel, rows: int) -> tuple[list[KVCache], Tensor]:
    """Caches that hold the prompts, and the logits after them."""
    ids, mask = texts(rows)
    caches, mask = model.new_caches(PAST + STEPS), mask[:, :PAST]
    places = (mask.cumsum(1) - 1).clamp(min=0)
    result = model.step(StepInput(ids[:, :PAST], caches[0], mask, places), caches).result
    assert result is not None
    return caches, result


def actual(model: CutModel, rows: int) -> Tensor:
    caches, first = begun(model, rows)
    logits, ids = [first], texts(rows)[0]
    for index in range(PAST, PAST + STEPS):
        result = model.step(StepInput(ids[:, index, None], caches[0], follows=True), caches).result
        assert result is not None
        logits.append(result)
    assert all(cache.length == PAST + STEPS for cache in caches)
    return torch.cat(logits, dim=1).cpu()


@pytest.mark.parametrize("name", swept(NAMES, []))
@interpreted
def test_steps_of_ranges_one_after_the_other_are_those_of_the_model(name: str) -> None:
    model = shallow(name, 2)
    assert error(actual(CutModel(model, (0, 1, 2), "triton"), 2), expected(model, 2)) <= SAME


@sweep
@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS + 1])
@interpreted
def test_ranges_take_any_number_of_rows(rows: int) -> None:
    """More rows than one pass over a weight serves take another path."""
    model = shallow("gpt2", 3)
    assert error(actual(CutModel(model, (0, 1, 2, 3), "triton"), rows), expected(model, rows)) <= SAME


@sweep
@interpreted
def test_a_range_has_the_kernels_of_its_layers_alone() -> None:
    model = CutModel(shallow("gpt2", 2), (0, 1, 2), "triton")
    actual(model, 1)
    first, last = ([node.stage for node in runner.info.nodes] for runner in model.runners)
    names = {stage: message(Phase.DECODE, stage) for stage in (Stage.EMBED, Stage.LM_HEAD, Stage.SAMPLE)}
    assert first[0] == names[Stage.EMBED]
    assert names[Stage.LM_HEAD] not in first
    assert names[Stage.EMBED] not in last
    assert last[-2:] == [names[Stage.LM_HEAD], names[Stage.SAMPLE]]


@pytest.mark.parametrize("name", NAMES)
@on_gpu
def test_graphs_of_ranges_are_the_model(name: str) -> None:
    """Replayed, launched, and with more rows than one pass over a weight serves."""
    model = vanilla(name)
    ends = (0, 1, 2, model.config.num_hidden_layers)
    played, launched = (CutModel(model, ends, "triton", graphs=graphs) for graphs in (True, False))
    for rows in (1, 3, FEW_ROWS + 3):
        for _ in range(2):  # the second time with the captured graph
            assert error(actual(played, rows), expected(model, rows)) <= SAME
        assert torch.equal(actual(played, rows), actual(launched, rows))
