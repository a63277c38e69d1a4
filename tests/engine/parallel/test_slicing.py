"""A rank's copy of a model: what it contains, and what remains of the model."""

import pytest
import torch
from helpers.models.sliced_models import logits, seeded
from torch import nn
from transformers import PreTrainedModel

from labkit.engine.parallel.slicing import Role, SlicingPlan, plan_slicing, slice_model, tensor_parallel_model
from labkit.engine.parallel.slicing.linear import RowParallelLinear


def cut_weights(plan: SlicingPlan, *, sliced: bool = False) -> list[str]:
    """The names of the cut weights in the model, or in a rank's copy."""
    ends = {Role.COLUMN: "weight", Role.ROW: "partial.weight" if sliced else "weight"}
    return [f"{name}.{ends[role]}" for name, role in plan.roles.items() if role != Role.WHOLE]


def storages(model: nn.Module) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}


def elements(model: PreTrainedModel, names: list[str]) -> int:
    return sum(model.get_parameter(name).numel() for name in names)


@pytest.mark.parametrize("name", ["t5", "gpt2", "llama"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_ranks_hold_each_cut_weight_once(name: str, ranks: int) -> None:
    model = seeded(name)
    plan = plan_slicing(model, ranks)
    cut = cut_weights(plan, sliced=True)
    shares = [slice_model(model, plan, rank) for rank in range(ranks)]
    assert sum(elements(share, cut) for share in shares) == elements(model, cut_weights(plan))
    for share in shares:
        for weight in cut:
            storage = share.get_parameter(weight).untyped_storage()
            assert storage.nbytes() == share.get_parameter(weight).nbytes
            assert storage.data_ptr() not in storages(model)


def test_what_is_not_cut_shares_the_memory_of_the_model() -> None:
    model = seeded("bloom")
    sliced = slice_model(model, plan_slicing(model, 2), 1)
    words = sliced.transformer.word_embeddings.weight
    assert words.data_ptr() == model.transformer.word_embeddings.weight.data_ptr()
    assert words is not model.transformer.word_embeddings.weight
    assert sliced.lm_head.weight is words, "tied weights stay tied"


def test_the_model_stays_usable() -> None:
    model = seeded("gpt2")
    expected = logits("gpt2", model)
    sliced = slice_model(model, plan_slicing(model, 3), 2)
    sliced.to(torch.float64)
    assert model.dtype == torch.float32
    assert torch.equal(logits("gpt2", model), expected)
    assert isinstance(sliced.transformer.h[0].attn.c_attn, nn.Linear)
    assert isinstance(sliced.transformer.h[0].attn.c_proj, RowParallelLinear)


@pytest.mark.parametrize("name", ["t5", "mixtral"])
def test_a_consumed_model_gives_the_same_share_and_keeps_no_cut_weight(name: str) -> None:
    model = seeded(name)
    plan = plan_slicing(model, 2)
    expected = slice_model(model, plan, 1).state_dict()
    actual = slice_model(model, plan, 1, consume=True).state_dict()
    assert all(torch.equal(actual[key], value) for key, value in expected.items())
    assert elements(model, cut_weights(plan)) == 0


def test_biases_of_row_parallel_linears_are_whole_on_every_rank() -> None:
    model = seeded("bert")
    plan = plan_slicing(model, 2)
    for rank in range(2):
        sliced = slice_model(model, plan, rank)
        name = "bert.encoder.layer.0.output.dense.bias"
        assert torch.equal(sliced.get_parameter(name), model.get_parameter(name))


def test_one_rank_is_the_model_itself() -> None:
    model = seeded("marian")
    alone = tensor_parallel_model(model, rank=0, size=1)
    torch.testing.assert_close(logits("marian", alone), logits("marian", model))


def test_a_rank_that_the_plan_does_not_have_is_refused() -> None:
    model = seeded("gpt2")
    with pytest.raises(ValueError, match="rank 2 is not one of the plan's 2 ranks"):
        slice_model(model, plan_slicing(model, 2), 2)
