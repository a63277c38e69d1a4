"""Attention in Triton equals the reference."""

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from helpers.kernels.gpus import INTERPRETED
from helpers.kernels.ops import DTYPES, MASKS, Draw, distance, double, mask_for, rows_of
from helpers.sweeps import crossed, numbered, sweep
from torch import Tensor

from labkit.kernels import attention, gpu
from labkit.kernels.attention import cases as attention_cases
from labkit.kernels.attention import triton_impl as attention_impl
from labkit.kernels.attention.reference import attention as attention_reference
from labkit.kernels.shapes import ODD, TOLERANCES
from labkit.kernels.types import (
    AttentionParams,
    Heads,
    LayerCache,
    Rows,
)

FLOAT32 = TOLERANCES[torch.float32]
pytestmark = [pytest.mark.usefixtures("poisoned"), *INTERPRETED]


def attention_inputs(
    draw: Draw, case: attention_cases.AttentionCase, mask: str, *, batch: int = 2, capacity: int | None = None
) -> tuple[Tensor, AttentionParams, Heads, Rows, LayerCache]:
    """Arguments of the op; slots after the new tokens are NaN."""
    heads, total = case.shape.heads, case.past + case.tokens
    capacity = capacity or total + 3
    rows = rows_of(batch, case.tokens, case.past, mask=mask_for(mask, batch, total), slots=capacity)
    cache, _ = draw.cache(heads, rows, total, capacity)
    slopes = 2.0 ** -torch.arange(1.0, heads.query + 1) if case.shape.alibi else None
    queries = draw.normal(batch * case.tokens, heads.query * heads.dim)
    cap = 1.5 if case.window else None
    sinks = torch.linspace(-3.0, 4.0, heads.query) if case.window else None
    params = AttentionParams(0.25, case.window, slopes, case.causal, cap, sinks)
    return queries, params, heads, rows, replace(cache, past=case.past)


@pytest.mark.parametrize(
    ("dtype", "step"), crossed(DTYPES, numbered(zip(attention_cases.SMALL, cycle(MASKS), strict=False)))
)
def test_attention_equals_reference(dtype: torch.dtype, step: tuple[attention_cases.AttentionCase, str]) -> None:
    """Every kind of step with every kind of mask; a row that sees nothing gives zeros."""
    arguments = attention_inputs(Draw(dtype), *step)
    queries, params, heads, rows, cache = arguments
    expected = attention_reference(queries.double(), double(params), heads, rows, double(cache))
    actual = attention(*arguments, impl="triton")
    assert distance(actual, expected) <= TOLERANCES[dtype]
    assert not actual[expected.eq(0).all(dim=1)].any()


@sweep
def test_attention_split_over_programs_equals_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if most shares are empty. The memory for the shares is clean afterwards: a second call gives the same."""
    monkeypatch.setattr(attention_impl, "processors", lambda: 132)
    few, grouped, pairs, alibi = ODD
    for shape, past, window, mask in (
        (few, 0, None, "none"),
        (few, 130, 9, "left"),
        (pairs, 2, None, "left"),
        (pairs, 250, None, "row-of-padding"),
        (grouped, 250, 9, "none"),
        (alibi, 130, None, "holes"),
    ):
        arguments = attention_inputs(
            Draw(), attention_cases.AttentionCase(shape, past, window=window), mask, capacity=300
        )
        queries, params, heads, rows, cache = arguments
        assert attention_impl.splits_for(rows.batch, heads, 300) == 5
        partials = attention_impl.Partials.of(rows.batch, heads, queries.device)
        contexts = [
            attention_impl.attention(*arguments, torch.empty_like(queries), gpu.Launcher(), partials) for _ in range(2)
        ]
        expected = attention_reference(queries.double(), double(params), heads, rows, double(cache))
        assert distance(contexts[0], expected) <= FLOAT32
        assert torch.equal(contexts[1], contexts[0])
        assert not partials.arrived.any()


def test_huge_scores_do_not_overflow() -> None:
    """Softmax subtracts the peak, so scores of ±1e4 give the value of the best key."""
    for heads, tokens in product((Heads(1, 1, 20), Heads(3, 1, 20)), (1, 3)):
        draw, rows = Draw(), rows_of(1, tokens, 8)
        cache, _ = draw.cache(heads, rows, 8 + tokens, 12)
        queries = draw.normal(tokens, heads.query * 20)
        last = queries[-1].view(heads.query, 20)
        best = (last @ cache.keys[0, 0, : 8 + tokens, :20].T).argmax(dim=1)
        context = attention(queries, AttentionParams(1e4), heads, rows, replace(cache, past=8), impl="triton")
        assert distance(context[-1].view(heads.query, 20), cache.values[0, 0, best, :20]) <= FLOAT32
