"""Arguments that would make kernels read or write beyond a buffer are refused before the call."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.kernels.ops import Draw, rows_of

from labkit.kernels import attention, gemm, mlp_gemm, qkv_gemm, residual_add
from labkit.kernels.all_reduce import all_gather, all_reduce
from labkit.kernels.types import AttentionParams, Heads, LayerCache, MlpWeights, QkvWeights, Rows

HEADS, PARAMS, ROWS = Heads(3, 3, 20), AttentionParams(0.25), rows_of(2, 3, 4)
SLOPES = replace(PARAMS, slopes=torch.tensor([0.5, 0.25, 0.125]))
DRAW = Draw()


def attend(
    rows: int = 6,
    params: AttentionParams = PARAMS,
    heads: Heads = HEADS,
    row_tables: Rows = ROWS,
    slots: int = 7,
    threads: int = 1,
) -> object:
    cache = LayerCache(torch.zeros(2, 3, slots, 32), torch.zeros(2, 3, slots, 32), 4)
    return attention(
        torch.zeros(rows, heads.query * heads.dim), params, heads, row_tables, cache, threads=threads, impl="cpp"
    )


def project(rows: int = 6, threads: int = 1) -> object:
    weights = QkvWeights(DRAW.norm("none", 20), DRAW.linear(180, 20)[1])
    cache = LayerCache(torch.zeros(2, 3, 7, 32), torch.zeros(2, 3, 7, 32), 4)
    return qkv_gemm(torch.zeros(rows, 20), weights, HEADS, None, ROWS, cache, threads=threads, impl="cpp")


def expand(addends: int = 6, threads: int = 1) -> object:
    weights = MlpWeights(DRAW.norm("none", 20), DRAW.linear(40, 20)[1], "relu")
    return mlp_gemm(torch.zeros(6, 20), torch.zeros(addends, 20), None, weights, threads=threads, impl="cpp")


def add(mlp_rows: int = 6, attn_rows: int = 6, threads: int = 1) -> object:
    parts = (torch.zeros(mlp_rows, 20), None, torch.zeros(attn_rows, 20))
    return residual_add(torch.zeros(6, 20), *parts, threads=threads, impl="cpp")


def multiply(threads: int = 1) -> object:
    return gemm(torch.zeros(1, 20), DRAW.linear(3, 20)[1], threads=threads, impl="cpp")


OPS: list[Callable[..., object]] = [attend, project, expand, add, multiply]


@pytest.mark.parametrize("call", OPS)
def test_no_thread_at_all_is_refused(call: Callable[..., object]) -> None:
    call()
    with pytest.raises(ValueError, match="got threads = 0, expected 1 to"):
        call(threads=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attend(rows=5), r"queries: expected contiguous float32 \[6, 60\], got torch.float32 \[5, 60\]"),
        (lambda: project(rows=7), r"hidden: .* \[6, 20\], got torch.float32 \[7, 20\]"),
        (lambda: expand(addends=5), r"addend: .* \[6, 20\], got torch.float32 \[5, 20\]"),
        (lambda: add(mlp_rows=5), r"mlp_out: .* \[6, 20\], got torch.float32 \[5, 20\]"),
        (lambda: add(attn_rows=5), r"attn_out: .* \[6, 20\], got torch.float32 \[5, 20\]"),
        (lambda: residual_add(torch.zeros(6, 20).t(), torch.zeros(20, 6), None, impl="cpp"), "residual: .* contiguous"),
        (lambda: attend(heads=Heads(1, 1, 528)), "head_dim is 528; the cpp kernels take up to 512"),
        (lambda: attend(slots=6), "cache of 6 slots can't take 3 tokens after 4"),
        (
            lambda: attend(row_tables=replace(ROWS, key_positions=None), params=SLOPES),
            "got slopes and no key_positions",
        ),
        (lambda: attend(row_tables=rows_of(2, 3, 3)), r"key_positions: expected \[2, 7 or more\], got \[2, 6\]"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_sums_of_ranks_take_contiguous_float32() -> None:
    exchange: Any = None  # not used
    for x in (torch.ones(4, dtype=torch.bfloat16), torch.ones(4, 4).t(), torch.ones(4, device="meta")):
        with pytest.raises(ValueError, match="expected contiguous numbers on the CPU"):
            all_reduce(x, exchange, impl="cpp")
    with pytest.raises(ValueError, match="expected contiguous numbers on the CPU"):
        all_gather(torch.ones(4, 4).t(), exchange, impl="cpp")


def test_slopes_with_the_positions_of_all_slots_are_taken() -> None:
    attend(params=SLOPES)
