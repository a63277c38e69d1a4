"""What the one-call step says about the experts that it chose and read."""

import pytest
import torch
from helpers.models.engines import fused, prompt, vanilla
from helpers.models.small_models import WITH_EXPERTS
from torch import Tensor

import labkit
from labkit.stages import Phase
from labkit.system.errors import UserError

with_experts = pytest.mark.parametrize("name", WITH_EXPERTS)


def chosen_by_transformers(name: str, ids: Tensor) -> Tensor:
    """The experts of each row in transformers, sorted, [layers, rows, experts of a row]."""
    model = vanilla(name)
    logits = model(ids, output_router_logits=True).router_logits
    per_row = labkit.init_inference(model, dtype=torch.float32).weights.experts_of_a_row
    return torch.stack([layer.topk(per_row).indices.sort().values for layer in logits])


@with_experts
def test_chosen_experts_are_those_of_transformers(name: str) -> None:
    ids = prompt(3, 7)
    with fused(name).noting_experts() as chosen:
        fused(name)(ids)
    (of_prompt,) = chosen
    assert torch.equal(of_prompt.sort().values, chosen_by_transformers(name, ids))


@with_experts
def test_experts_read_are_those_that_a_row_chose(name: str) -> None:
    engine, ids = fused(name), prompt(2, 1)
    engine.stage_times()
    with engine.noting_experts() as chosen:
        engine.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    expected = [[len(layer.unique()) for layer in step] for step in chosen[1:]]
    (decode,) = (read for read in engine.experts_read() if read.phase == Phase.DECODE)
    assert decode.calls == len(expected) == 5
    assert decode.by_layer == pytest.approx(torch.tensor(expected, dtype=torch.float64).mean(0).tolist())


def test_steps_in_one_call_read_what_single_steps_read() -> None:
    """`noting_experts` asks for one call per step."""
    engine, ids, reads = fused("qwen2-moe"), prompt(2, 3), []
    for _ in range(2):
        engine.stage_times()
        engine.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        reads.append(engine.experts_read())
        with engine.noting_experts():
            engine.stage_times()
            engine.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        reads.append(engine.experts_read())
    assert all(read == reads[0] for read in reads)
    assert all(0 < layer <= 8 for layer in reads[0][-1].by_layer)


def test_engines_without_mixtures_or_without_the_one_call_step_are_refused() -> None:
    assert fused("llama").experts_read() == []
    for engine in (fused("llama"), fused("mixtral", "reference")):
        with pytest.raises(UserError, match="expected a model with experts and impl='cpp'"), engine.noting_experts():
            pass
