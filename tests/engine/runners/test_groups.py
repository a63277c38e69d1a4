"""A padded prompt in groups of sequences: the fewest rows, and what each sequence gives by itself."""

from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.engines import error, fused, greedy, prompt, vanilla
from helpers.models.offloaded import reader_of, streamed
from helpers.sweeps import swept
from torch import Tensor

import labkit
from labkit.engine.runners import groups as module
from labkit.engine.runners import one_call
from labkit.engine.runners import step as step_module
from labkit.engine.runners.groups import groups_of

SAME = 1e-5  # of the range of the logits
MODELS = ("gpt2", "llama", "bloom", "mistral", "gemma2", "opt", "gptj", "qwen3")
LENGTHS = (3, 19, 4, 11, 19)
each_model = pytest.mark.parametrize("name", swept(MODELS, ("gpt2", "llama", "bloom", "mistral")))


def padded(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Token ids, and their mask with padding on the left."""
    longest = max(lengths)
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    return prompt(len(lengths), longest), mask


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> list[list[range]]:
    """Divides small prompts, too, and returns the groups of all steps so far."""
    monkeypatch.setattr(module, "LEAST_ROWS", 1)
    seen: list[list[range]] = []

    def note(step: Any) -> list[range]:
        seen.append(module.padded_groups(step))
        return seen[-1]

    monkeypatch.setattr(one_call, "padded_groups", note)
    return seen


@pytest.mark.parametrize("least", [1, 5])
@pytest.mark.parametrize("lengths", [*product([1, 4, 9], repeat=4), (7,), (1, 1, 30, 30, 2, 2, 2, 31)])
def test_no_division_has_fewer_rows(lengths: tuple[int, ...], least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_ROWS", least)

    def rows(groups: list[range]) -> int:
        return sum(max(least, len(group) * max(lengths[group.start : group.stop])) for group in groups)

    count = len(lengths)
    fewest = min(
        rows([range(begin, end) for begin, end in zip([0, *cuts], [*cuts, count], strict=True)])
        for size in range(count)
        for cuts in map(list, combinations(range(1, count), size))
    )
    groups = groups_of(lengths)
    assert [index for group in groups for index in group] == list(range(count))
    assert rows(groups) == fewest


@each_model
@pytest.mark.parametrize("rows", [512, 7])
@pytest.mark.usefixtures("poisoned")
def test_each_sequence_gives_what_it_gives_alone(
    name: str, rows: int, grouped: list[list[range]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "CHUNK_ROWS", rows)
    monkeypatch.setattr(module, "CHUNK_ROWS", rows)
    engine, (ids, mask) = fused(name), padded(LENGTHS)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = engine(ids, attention_mask=mask, position_ids=positions)
    assert [len(group) for group in grouped[0]] == [1, 1, 1, 1, 1]
    next_ids = ids[:, :1]
    further = torch.cat([mask, torch.ones_like(next_ids)], dim=1)
    following = engine(
        next_ids, past_key_values=out.past_key_values, attention_mask=further, position_ids=positions[:, -1:] + 1
    ).logits
    for row, length in enumerate(LENGTHS):
        alone = engine(ids[row : row + 1, -length:])
        assert error(out.logits[row : row + 1, -length:], alone.logits) <= SAME
        after = engine(next_ids[row : row + 1], past_key_values=alone.past_key_values).logits
        assert error(following[row : row + 1], after) <= SAME
    assert not out.logits.isnan().any()


@each_model
def test_generated_tokens_equal_vanilla(name: str, grouped: list[list[range]]) -> None:
    ids, mask = padded((3, 3, 18, 18, 2))
    options: dict[str, Any] = {"attention_mask": mask}
    assert torch.equal(greedy(fused(name), ids, 8, **options), greedy(vanilla(name), ids, 8, **options))
    assert [list(group) for group in grouped[0]] == [[0, 1], [2, 3], [4]]
    assert len(grouped) == 1  # later steps have one token of each sequence


@pytest.mark.parametrize("keep", [1, 4, 19])
def test_only_the_last_logits_on_request(keep: int, grouped: list[list[range]]) -> None:
    engine, (ids, mask) = fused("llama"), padded(LENGTHS)
    every = engine(ids, attention_mask=mask).logits
    kept = engine(ids, attention_mask=mask, logits_to_keep=keep).logits
    assert error(kept, every[:, -keep:]) <= SAME
    assert all(grouped)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_any_type_has_every_sequence_in_its_place(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, grouped: list[list[range]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = labkit.init_inference(vanilla("llama"), dtype=dtype, kv_dtype=kv_dtype)
    ids, mask = padded(LENGTHS)
    in_groups = engine(ids, attention_mask=mask).logits[:, -1:]
    assert all(grouped)
    monkeypatch.setattr(one_call, "padded_groups", lambda step: [])
    assert error(in_groups, engine(ids, attention_mask=mask).logits[:, -1:]) <= (
        SAME if dtype == torch.float32 else 0.02
    )


def test_layers_that_are_read_from_the_disk_take_all_groups_in_one_pass(
    grouped: list[list[range]], tmp_path: Path
) -> None:
    engine, (ids, mask) = streamed("llama", tmp_path), padded(LENGTHS)
    reader_of(engine).take_spans()
    in_groups = engine(ids, attention_mask=mask).logits[:, -1:]
    computed = [span.layer for span in reader_of(engine).take_spans() if span.kind == "compute"]
    assert computed == list(range(engine.model_config.num_layers))
    assert error(in_groups, fused("llama")(ids, attention_mask=mask).logits[:, -1:]) <= SAME
    assert all(grouped)


@pytest.mark.parametrize(
    "hidden",
    {
        "on the right": (slice(5, None), slice(0)),
        "in the middle": (slice(0), slice(3, 15)),
        "hardly any": (slice(0, 1), slice(0)),
        "none": (slice(0), slice(0)),
        "a whole sequence": (slice(None), slice(0)),
    }.values(),
)
def test_other_prompts_stay_whole(hidden: tuple[slice, slice], grouped: list[list[range]]) -> None:
    mask = torch.ones(2, 20, dtype=torch.int64)
    for columns in hidden:
        mask[1, columns] = 0
    fused("gpt2")(prompt(2, 20), attention_mask=mask)
    assert grouped == [[]]
