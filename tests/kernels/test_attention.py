"""Region 2: attention of queries to the KV cache."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers.kernels.ops import DTYPES, MASKS, UNIT, Draw, assert_near, mask_for, rounds_activations, rows_of

from labkit.kernels import attention
from labkit.kernels.types import AttentionParams, Heads, LayerCache

HEADS = {
    "3x20": Heads(3, 3, 20),
    "6:2x64": Heads(6, 2, 64),
    "5:1x80": Heads(5, 1, 80),
    "2x7": Heads(2, 2, 7),
    "4:2x128": Heads(4, 2, 128),
}
STEPS = [(3, 1, 22), (1, 1, 0), (2, 13, 0), (2, 5, 17), (2, 40, 9)]  # sequences, new tokens, tokens in the cache
PARAMS = {
    "all": AttentionParams(0.25),
    "window": AttentionParams(0.25, window=7),
    "window-1": AttentionParams(0.25, window=1),
    "cap": AttentionParams(2.0, window=7, cap=1.5),
    "alibi": AttentionParams(0.25, slopes=torch.tensor([0.5, 0.25, 0.0625, 0.7, 0.03, 0.2])),
    "sinks": AttentionParams(0.25, window=7, sinks=torch.tensor([0.5, -3.0, 4.0, 200.0, -200.0, 0.0])),
    "whole": AttentionParams(0.25, causal=False),
}
LONG = [(1, 1, 1300), (3, 2, 600), (2, 60, 300), (1, 300, 0)]  # several parts, or several blocks of a prompt
pytestmark = pytest.mark.usefixtures("poisoned", "isa")


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_cpp_equals_reference(dtype: torch.dtype, heads: Heads, params: AttentionParams) -> None:
    compare(dtype, heads, params, STEPS, MASKS, tolerance=2e-6)


@pytest.mark.parametrize("params", [*PARAMS.values(), AttentionParams(0.25, window=700)], ids=[*PARAMS, "window-700"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_cpp_equals_reference_over_long_contexts(dtype: torch.dtype, params: AttentionParams) -> None:
    for heads in (HEADS["6:2x64"], HEADS["5:1x80"], HEADS["4:2x128"]):
        compare(dtype, heads, params, LONG, ["left"], tolerance=1e-5)  # ALiBi's scores are in the hundreds


def compare(
    dtype: torch.dtype,
    heads: Heads,
    params: AttentionParams,
    steps: Sequence[tuple[int, int, int]],
    masks: Sequence[str],
    *,
    tolerance: float,
) -> None:
    draw = Draw(dtype)
    for (batch, tokens, past), mask in product(steps, masks):
        capacity = past + tokens + 3
        rows = rows_of(batch, tokens, past, mask=mask_for(mask, batch, past + tokens), slots=capacity)
        cache, twin = draw.cache(heads, rows, past + tokens, capacity)
        cache, twin = (replace(kv, past=past) for kv in (cache, twin))
        case_params = of_heads(params, heads)
        queries = draw.normal(batch * tokens, heads.query * heads.dim)
        if rounds_activations(dtype):  # the queries of a prompt; how much that moves a score is no matter of the kernel
            queries = queries.bfloat16().float()
        expected = attention(queries, case_params, heads, rows, cache, impl="reference")
        actual = attention(queries, case_params, heads, rows, twin, impl="cpp")
        rounding = UNIT[dtype] if rounds_activations(dtype) else 0.0
        assert_near(actual, expected, cache.values[:, :, : past + tokens].float().abs().max(), tolerance + rounding)


def of_heads(params: AttentionParams, heads: Heads) -> AttentionParams:
    """With the vectors of these heads alone."""
    slopes, sinks = (
        None if vector is None else vector[: heads.query].contiguous() for vector in (params.slopes, params.sinks)
    )
    return replace(params, slopes=slopes, sinks=sinks)


# At most 4 new tokens: with more, the kernels of some instruction sets read the slots of every sequence.
SHARED = [(4, 4, 1, 700, 650), (6, 3, 1, 40, 40), (6, 2, 4, 300, 130), (4, 2, 1, 20, 0)]


@pytest.mark.parametrize("params", [*PARAMS.values(), AttentionParams(0.25, window=500)], ids=[*PARAMS, "window-500"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("batch", "alike", "tokens", "past", "shared"), SHARED)
def test_slots_that_sequences_share_are_read_from_the_first_of_them(
    heads: Heads, params: AttentionParams, batch: int, alike: int, tokens: int, past: int, shared: int
) -> None:
    """The others are NaN there."""
    draw, slots = Draw(torch.bfloat16), past + tokens
    mask = torch.ones(batch, slots, dtype=torch.int64)
    mask[:alike, : min(5, shared)] = mask[-alike:, 7 : min(9, shared)] = 0
    rows = rows_of(batch, tokens, past, mask=mask, slots=slots)
    cache = replace(draw.cache(heads, rows, slots, slots)[0], past=past)
    for part in (cache.keys, cache.values):
        of_groups = part.view(-1, alike, *part.shape[1:])
        of_groups[:, 1:, :, :shared] = of_groups[:, :1, :, :shared]
    case_params, queries = of_heads(params, heads), draw.normal(batch * tokens, heads.query * heads.dim)
    expected = attention(queries, case_params, heads, rows, cache, impl="reference")
    for part in (cache.keys, cache.values):
        part.view(-1, alike, *part.shape[1:])[:, 1:, :, :shared] = torch.nan
    sharing = replace(rows, alike=alike, shared=shared)
    contexts = [
        attention(queries, case_params, heads, sharing, cache, threads=threads, impl="cpp") for threads in (1, 3)
    ]
    assert torch.equal(contexts[0], contexts[1])
    assert_near(contexts[0], expected, cache.values[0].float().abs().max() * 2, 1e-5 + UNIT[torch.bfloat16])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("batch", "tokens", "past"), LONG)
def test_the_number_of_threads_changes_no_bit(batch: int, tokens: int, past: int, int8: bool) -> None:
    heads, draw = HEADS["6:2x64"], Draw(torch.float32)
    rows = rows_of(batch, tokens, past, slots=past + tokens)
    _, cache = draw.cache(heads, rows, past + tokens, past + tokens)
    if int8:
        scales = torch.full(cache.keys.shape[:3], 0.01, dtype=torch.bfloat16)
        keys, values = ((part * 30).clamp(-127, 127).to(torch.int8) for part in (cache.keys, cache.values))
        cache = LayerCache(keys, values, past, key_scales=scales, value_scales=scales.clone())
    cache = replace(cache, past=past)
    queries = draw.normal(batch * tokens, heads.query * heads.dim)
    contexts = [
        attention(queries, AttentionParams(0.2), heads, rows, cache, threads=threads, impl="cpp")
        for threads in (1, 2, 5)
    ]
    assert torch.equal(contexts[0], contexts[1])
    assert torch.equal(contexts[0], contexts[2])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dim", [64, 80])
def test_a_query_that_is_no_number_gives_no_number(dim: int, int8: bool, value: float) -> None:
    """And changes no other query, not even one of the same tile."""
    heads, draw = Heads(3, 1, dim), Draw(torch.bfloat16)
    rows = rows_of(1, 1, 40, slots=41)
    cache = replace(draw.cache(heads, rows, 41, 41)[1], past=40)
    if int8:
        scales = torch.full(cache.keys.shape[:3], 0.01, dtype=torch.bfloat16)
        keys, values = ((part * 30).clamp(-127, 127).to(torch.int8) for part in (cache.keys, cache.values))
        cache = LayerCache(keys, values, 40, key_scales=scales, value_scales=scales.clone())
    queries = draw.normal(1, 3 * dim)
    before = attention(queries, AttentionParams(0.2), heads, rows, cache, impl="cpp").view(3, dim)
    queries[0, dim + 3] = value
    after = attention(queries, AttentionParams(0.2), heads, rows, cache, impl="cpp").view(3, dim)
    assert after[1].isnan().all()
    assert torch.equal(after[::2], before[::2])


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    heads, draw = HEADS["3x20"], Draw()
    rows = rows_of(2, 4, mask=torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1]]))
    cache, _ = draw.cache(heads, rows, 4, 4)
    cache = replace(cache, past=0)
    context = attention(draw.normal(8, 60), AttentionParams(0.3), heads, rows, cache, impl="cpp")
    visible = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1], dtype=torch.bool)
    assert not context[~visible].any()
    assert context[visible].any(dim=1).all()


@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_without_causal_the_order_of_the_tokens_means_nothing(impl: str) -> None:
    """Reordered tokens and keys give the contexts in the same new order; the last key is then seen first."""
    heads, draw, params = HEADS["6:2x64"], Draw(), AttentionParams(0.2, causal=False)
    cache, _ = draw.cache(heads, rows_of(2, 9), 9, 9)
    queries, order = draw.normal(18, 6 * 64), torch.randperm(9, generator=draw.generator)
    mask = torch.tensor([[1] * 9, [1, 0, 1, 1, 0, 1, 1, 1, 0]])
    contexts = []
    for places in (torch.arange(9), order):
        slots = LayerCache(cache.keys[:, :, places].contiguous(), cache.values[:, :, places].contiguous(), 0)
        rows, tokens = rows_of(2, 9, mask=mask[:, places]), queries.view(2, 9, -1)[:, places]
        context = attention(tokens.flatten(0, 1).contiguous(), params, heads, rows, slots, impl=impl)
        contexts.append(context.view(2, 9, -1))
    assert_near(contexts[1], contexts[0][:, order], 1.0, 1e-5)


def test_a_window_needs_causal() -> None:
    with pytest.raises(ValueError, match=r"got window = 7 with causal = False; .* leave out one of the two"):
        AttentionParams(0.3, window=7, causal=False)


def test_huge_scores_do_not_overflow() -> None:
    """Softmax subtracts the peak, so scores of ±1e4 give the value of the best key."""
    heads, draw = Heads(1, 1, 20), Draw()
    rows = rows_of(1, 1, 8)
    cache, _ = draw.cache(heads, rows, 9, 9)
    cache = replace(cache, past=8)
    queries = draw.normal(1, 20)
    best = (cache.keys[0, 0, :, :20] @ queries[0]).argmax()
    context = attention(queries, AttentionParams(1e4), heads, rows, cache, impl="cpp")
    assert_near(context[0], cache.values[0, 0, best, :20], 1.0, 1e-5)
