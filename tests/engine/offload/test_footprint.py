"""The memory of an engine is estimated before loading, and the estimate is never below the real use."""

from ctypes import byref
from typing import Any

import pytest
import torch
from helpers.models.engines import FEW, vanilla

import labkit
from labkit.engine.offload.footprint import OTHERS, Footprint
from labkit.engine.runners.step import CHUNK_ROWS
from labkit.kernels import build
from labkit.weights.spec import WeightSpec


def footprint(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Footprint:
    return Footprint.of(WeightSpec.of(vanilla(name).config, dtype), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FEW)
def test_the_workspace_is_no_larger_than_it_was_counted(name: str, dtype: torch.dtype) -> None:
    engine = labkit.init_inference(vanilla(name), dtype=dtype)
    estimate = footprint(name, dtype)
    for rows, all_rows in ((1, 1), (7, 7), (CHUNK_ROWS, 3 * CHUNK_ROWS)):
        used = build.load(engine.weights.weight_type).labkit_workspace_bytes(byref(engine.weights.c), all_rows, rows, 2)
        estimated = rows * estimate.row + all_rows * estimate.kept_row
        assert used <= estimated + OTHERS
        assert used <= estimated * 1.2 + 4096


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_cache_is_counted_to_the_byte(name: str, kv_dtype: torch.dtype | None) -> None:
    engine = labkit.init_inference(vanilla(name), kv_dtype=kv_dtype)
    cache = engine.module.new_cache()
    cache.reserve(3, 64)
    assert cache.heads is not None
    assert (
        sum(tensor.nbytes for tensor in cache.heads.tensors) == 3 * 64 * footprint(name, kv_dtype=kv_dtype).kv_per_token
    )


def test_what_is_left_for_weights_and_the_largest_batch_agree() -> None:
    """The largest batch leaves room for the slots, and one sequence more does not."""
    estimate = footprint("llama")
    memory = estimate.outside + 2 * estimate.layer + OTHERS + 30_000_000
    largest = estimate.most_sequences(memory, 10, 50, slots=2)
    assert largest > 1
    assert estimate.outside + 2 * estimate.layer <= estimate.for_weights(memory, largest, 10, 50, slots=2) < memory
    with pytest.raises(
        ValueError, match=rf"for batch {largest + 1} of 50 tokens; the least that works with 2 slots is"
    ):
        estimate.for_weights(memory, largest + 1, 10, 50, slots=2)
    assert estimate.most_sequences(OTHERS, 10, 50, slots=2) == 0
