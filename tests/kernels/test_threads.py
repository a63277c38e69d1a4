"""Threads divide the outputs, never a sum: results have the same bits for any number of threads."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.kernels.ops import DTYPES, Draw, rows_of
from torch import Tensor

from labkit.kernels import attention, gemm, mlp_gemm, qkv_gemm, residual_add
from labkit.kernels.types import AttentionParams, Heads, MlpWeights, QkvWeights

HIDDEN, HEADS = 63, Heads(6, 2, 20)
pytestmark = pytest.mark.usefixtures("poisoned")


def run_gemm(dtype: torch.dtype, threads: int) -> tuple[Tensor, ...]:
    draw = Draw(dtype)
    _, packed = draw.linear(131, 513)
    return tuple(gemm(draw.normal(rows, 513), packed, impl="cpp", threads=threads) for rows in (1, 7, 30))


def run_qkv(dtype: torch.dtype, threads: int) -> tuple[Tensor, ...]:
    draw, rows = Draw(dtype), rows_of(3, 5, 2)
    _, packed = draw.linear(200, HIDDEN)
    weights = QkvWeights(draw.norm("layer", HIDDEN), packed)
    cache, _ = draw.cache(HEADS, rows, 2, 7)
    rotary = draw.rotary(20, 9, interleaved=False)
    out = qkv_gemm(draw.normal(15, HIDDEN), weights, HEADS, rotary, rows, cache, impl="cpp", threads=threads)
    return *out, cache.keys, cache.values


def run_attention(dtype: torch.dtype, threads: int) -> tuple[Tensor, ...]:
    draw, rows = Draw(dtype), rows_of(3, 5, 12)
    cache, _ = draw.cache(HEADS, rows, 17, 17)
    cache = replace(cache, past=12)
    params = AttentionParams(0.2, window=9)
    return (attention(draw.normal(15, 120), params, HEADS, rows, cache, impl="cpp", threads=threads),)


def run_mlp(dtype: torch.dtype, threads: int) -> tuple[Tensor, ...]:
    draw = Draw(dtype)
    _, packed = draw.linear(100, HIDDEN, gated=True)
    weights = MlpWeights(draw.norm("rms", HIDDEN), packed, "silu", gated=True)
    results: tuple[Tensor, ...] = ()
    for rows in (1, 13):
        hidden, addend = draw.normal(rows, HIDDEN), draw.normal(rows, HIDDEN)
        results += mlp_gemm(hidden, addend, None, weights, impl="cpp", threads=threads)
    return results


def run_residual(dtype: torch.dtype, threads: int) -> tuple[Tensor, ...]:
    draw = Draw(dtype)
    return (residual_add(draw.normal(13, HIDDEN), draw.normal(13, HIDDEN), None, impl="cpp", threads=threads),)


Run = Callable[[torch.dtype, int], tuple[Tensor, ...]]
RUNS: list[Run] = [run_gemm, run_qkv, run_attention, run_mlp, run_residual]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_results_are_bitwise_the_same_for_any_number_of_threads(dtype: torch.dtype, run: Run) -> None:
    expected = run(dtype, 1)
    for threads in (2, 3, 9):
        assert_bitwise_equal(run(dtype, threads), expected)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_results_do_not_depend_on_what_ran_before(dtype: torch.dtype, run: Run) -> None:
    """Buffers stay from call to call; the call before leaves them full of NaN."""
    draw = Draw(dtype)
    _, packed = draw.linear(40, 700)
    expected = run(dtype, 2)
    gemm(torch.full((64, 700), float("nan")), packed, impl="cpp", threads=2)
    mlp_gemm(
        torch.full((64, 700), float("nan")), None, None, MlpWeights(draw.norm("rms", 700), packed, "relu"), impl="cpp"
    )
    assert_bitwise_equal(run(dtype, 2), expected)


def test_more_threads_than_processors_wake_each_other() -> None:
    """A thread that waits long goes to sleep; the test hangs if one is not woken."""
    expected_mlp, rows = run_mlp(torch.float32, 1), 64
    draw = Draw(torch.float32)
    _, packed = draw.linear(96, HIDDEN)
    inputs = draw.normal(rows, HIDDEN)
    expected = gemm(inputs, packed, impl="cpp", threads=1)
    for _ in range(100):
        assert_bitwise_equal(run_mlp(torch.float32, 9), expected_mlp)
        assert torch.equal(gemm(inputs, packed, impl="cpp", threads=9), expected)


def assert_bitwise_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        assert torch.equal(actual_tensor.nan_to_num(nan=77.0), expected_tensor.nan_to_num(nan=77.0))
