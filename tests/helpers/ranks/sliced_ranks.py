"""Checks of sliced models that each rank of a run makes."""

import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.models.sliced_models import ENCODERS, MODELS, logits, seeded, tokens
from transformers.models.t5.modeling_t5 import T5Block

from labkit.engine.parallel.slicing import tensor_parallel_model

T5_POLICY = {T5Block: ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")}
SEARCHES: dict[str, dict[str, Any]] = {
    "llama": {"cache_implementation": "static"},
    "gemma2": {"cache_implementation": "static"},
    "t5": {"num_beams": 3},
    "bloom": {"num_beams": 2},
}
Outcomes = dict[str, str]  # name of the check -> "" or the traceback


def outcomes_of_slicing() -> Outcomes:
    """All checks on this rank: models on all ranks, and one model cut by a policy on the first two ranks."""
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    outcomes = dict(checks(rank, size, dist.new_group(list(range(size)))))
    first_two = dist.new_group([0, 1])
    if rank < 2:
        outcomes["policy"] = caught(same_results, "t5", rank, 2, first_two, injection_policy=T5_POLICY)
    dist.barrier()
    return outcomes


def checks(rank: int, size: int, group: Any) -> Iterator[tuple[str, str]]:
    for name in MODELS:
        yield name, caught(same_results, name, rank, size, group)
    for dtype in (torch.bfloat16, torch.float16):
        yield str(dtype), caught(near_results, dtype, rank, size, group)
    yield "refusal", caught(refused_everywhere, rank, size, group)
    yield "odd model", caught(odd_model_is_refused, rank, size, group)


def caught(check: Any, *args: Any, **kwargs: Any) -> str:
    """Traceback of a failed check, or "". The rank goes on with the next check, so the others need not wait for it."""
    try:
        check(*args, **kwargs)
    except Exception:  # noqa: BLE001 - the test of this check reports it
        return traceback.format_exc()
    return ""


def same_results(name: str, rank: int, size: int, group: Any, **options: Any) -> None:
    model = seeded(name)
    sliced = tensor_parallel_model(model, rank=rank, size=size, group=group, **options)
    expected = logits(name, model)
    torch.testing.assert_close(logits(name, sliced), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    if name in ENCODERS:
        return
    assert torch.equal(tokens(name, sliced), tokens(name, model))
    if name in SEARCHES and not options:
        assert torch.equal(tokens(name, sliced, **SEARCHES[name]), tokens(name, model, **SEARCHES[name]))


def near_results(dtype: torch.dtype, rank: int, size: int, group: Any) -> None:
    model = seeded("llama").to(dtype)
    sliced = tensor_parallel_model(model, rank=rank, size=size, group=group)
    expected = logits("llama", seeded("llama"))
    error = (logits("llama", model) - expected).abs().max()
    assert (logits("llama", sliced) - expected).abs().max() < 2 * error


def refused_everywhere(rank: int, size: int, group: Any) -> None:
    policy = {T5Block: ("SelfAttention.output",)}
    with pytest.raises(ValueError, match=r"did you mean .*'SelfAttention\.o'"):
        tensor_parallel_model(seeded("t5"), rank=rank, size=size, group=group, injection_policy=policy)


def odd_model_is_refused(rank: int, size: int, group: Any) -> None:
    with pytest.raises(ValueError, match="ranks 1 have another model"):
        tensor_parallel_model(seeded("gpt2" if rank == 1 else "llama"), rank=rank, size=size, group=group)
