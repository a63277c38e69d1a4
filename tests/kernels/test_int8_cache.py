"""Keys and values in int8: their error, and that every implementation stores and reads the same."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers.kernels.ops import (
    ISAS,
    MASKS,
    OWN_ISA,
    Draw,
    assert_near,
    distance,
    double,
    mask_for,
    missing_instructions,
    rows_of,
)
from helpers.sweeps import swept
from torch import Tensor

from labkit.kernels import attention, gpu, qkv_gemm
from labkit.kernels.attention.reference import attention as attention_reference
from labkit.kernels.attention.reference import seen
from labkit.kernels.gemm import packed
from labkit.kernels.int8_cache import quantised, read_heads
from labkit.kernels.shapes import TOLERANCES
from labkit.kernels.types import AttentionParams, Heads, LayerCache, QkvWeights, Rows

HEADS = {"3x20": Heads(3, 3, 20), "6:2x64": Heads(6, 2, 64), "5:1x80": Heads(5, 1, 80)}
STEPS = [(3, 1, 22), (1, 1, 0), (2, 5, 17), (2, 40, 9)]  # sequences, new tokens, tokens in the cache
PAST, CAPACITY = 4, 40
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in"),  # the interpreter warns about intended NaN
]


@pytest.fixture(params=swept([*ISAS, "triton"], [OWN_ISA, "triton"]))
def impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Triton in its interpreter, or C++ built for each instruction set."""
    if request.param == "triton":
        if not gpu.interpreted() or gpu.unavailable():
            pytest.skip("runs in Triton's interpreter; set TRITON_INTERPRET=1")
        return "triton"
    if reason := missing_instructions(request.param):
        pytest.skip(reason)
    monkeypatch.setenv("LABKIT_ISA", request.param)
    return "cpp"


def in_int8(cache: LayerCache) -> LayerCache:
    """A cache with the same contents in int8; slots that hold NaN have NaN as their scale."""
    (keys, key_scales), (values, value_scales) = quantised(cache.keys), quantised(cache.values)
    return replace(cache, keys=keys, values=values, key_scales=key_scales, value_scales=value_scales)


def floats(cache: LayerCache, dim: int, slots: slice) -> tuple[Tensor, Tensor]:
    """(keys, values) of some slots."""
    keys = read_heads(cache.keys, cache.key_scales, slots, dim)
    return keys, read_heads(cache.values, cache.value_scales, slots, dim)


def test_no_number_is_off_by_more_than_half_a_scale() -> None:
    """For every magnitude. A scale is the largest number / 127, rounded to bfloat16."""
    sizes = 10.0 ** torch.arange(-34.0, 38.0)
    x = Draw().normal(len(sizes), 50, 20).clamp(-4, 4) * sizes[:, None, None]
    whole, scales = quantised(x)
    difference = (whole * scales[..., None].double() - x.double()).abs()
    assert bool((difference <= scales[..., None].double() * (0.5 + 1e-5)).all())
    largest_scale = x.double().abs().amax(dim=-1) / 127
    assert bool((scales.double() <= largest_scale * (1 + 2**-7)).all())
    assert int(whole.abs().max()) == 127


def test_zeros_stay_zeros_and_what_is_no_number_becomes_nan() -> None:
    x = torch.ones(5, 20)
    x[0], x[1, 3], x[2, 0], x[3, 19] = 0.0, float("inf"), -float("inf"), float("nan")
    whole, scales = quantised(x)
    actual = whole * scales[:, None].float()
    assert not actual[0].any()
    assert actual[1:4].isnan().all()
    assert_near(actual[4], x[4], 1.0, 0.5 / 127)


def appended(impl: str, weights: QkvWeights, heads: Heads, hidden: Tensor, rows: Rows, *, int8: bool) -> LayerCache:
    """A cache with the keys and values of new tokens in the slots from PAST on."""
    shape = (rows.batch, heads.kv, CAPACITY, -(-heads.dim // 16) * 16)
    cache = LayerCache(torch.zeros(shape), torch.zeros(shape), PAST)
    cache = in_int8(cache) if int8 else cache
    qkv_gemm(hidden, replace(weights, proj=packed(weights.proj, impl)), heads, None, rows, cache, impl=impl)
    return cache


def test_appended_tokens_are_quantised(impl: str) -> None:
    """As in the reference: a row of zeros stays zero, a row with an infinity becomes NaN, other slots stay the same."""
    for heads, (batch, tokens) in product(HEADS.values(), ((3, 1), (2, 13))):
        draw, rows = Draw(), rows_of(batch, tokens, PAST)
        plain, _ = draw.linear((heads.query + 2 * heads.kv) * heads.dim, 63, bias=False)
        weights, hidden = QkvWeights(draw.norm("none", 63), plain), draw.normal(batch * tokens, 63)
        hidden[0], hidden[-1, 5] = 0.0, float("inf")
        exact = appended(impl, weights, heads, hidden, rows, int8=False)
        int8_cache = appended(impl, weights, heads, hidden, rows, int8=True)
        new = slice(PAST, PAST + tokens)
        for x, slots, scales in zip(
            floats(exact, heads.dim, new),
            (int8_cache.keys, int8_cache.values),
            (int8_cache.key_scales, int8_cache.value_scales),
            strict=True,
        ):
            assert scales is not None
            numbers, expected_scales = read_heads(slots, scales, new, heads.dim), quantised(x)[1].float()
            finite = x.isfinite().all(dim=-1)
            assert not finite[-1, :, -1].any()
            assert numbers[~finite].isnan().all()
            assert not numbers[0, :, 0].any()
            assert_near(
                scales[:, :, new][finite], expected_scales[finite], expected_scales[finite].clamp(min=1e-30), 2**-6
            )
            assert_near(numbers[finite], x[finite], expected_scales[finite][:, None].clamp(min=1e-30), 0.51)
            other_slots = torch.ones(CAPACITY, dtype=torch.bool)
            other_slots[new] = False
            assert not slots[:, :, other_slots].any()
            assert not scales[:, :, other_slots].any()


def inputs(
    draw: Draw, heads: Heads, batch: int, tokens: int, past: int, mask: str
) -> tuple[Tensor, AttentionParams, Heads, Rows, LayerCache]:
    """Arguments of attention with a float cache; slots after the new tokens are NaN."""
    capacity = past + tokens + 3
    rows = rows_of(batch, tokens, past, mask=mask_for(mask, batch, past + tokens), slots=capacity)
    cache, _ = draw.cache(heads, rows, past + tokens, capacity)
    queries = draw.normal(batch * tokens, heads.query * heads.dim)
    return queries, AttentionParams(0.25), heads, rows, replace(cache, past=past)


def test_attention_equals_the_reference_on_the_same_cache(impl: str) -> None:
    for heads, (step, mask) in product(HEADS.values(), zip(STEPS, MASKS, strict=True)):
        queries, params, _, rows, cache = inputs(Draw(), heads, *step, mask)
        cache = in_int8(cache)
        expected = attention_reference(queries.double(), params, heads, rows, double(cache))
        actual = attention(queries, params, heads, rows, cache, impl=impl)
        if impl == "cpp":
            assert_near(actual, expected, 4.0, 2**-14)  # queries and probabilities are rounded to 16 bits
        else:
            assert distance(actual, expected) <= TOLERANCES[torch.float32]


def test_attention_is_off_by_no_more_than_its_keys_and_values() -> None:
    """A score changes by at most e = scale * |q| * half a key scale, so a probability by a factor of exp(2 e)."""
    for heads, step in product(HEADS.values(), STEPS):
        queries, params, _, rows, cache = inputs(Draw(), heads, *step, "none")
        int8_cache = in_int8(cache)
        expected = attention(queries, params, heads, rows, cache, impl="reference")
        actual = attention(queries, params, heads, rows, int8_cache, impl="cpp")
        total, group = cache.past + rows.tokens, heads.query // heads.kv
        assert int8_cache.key_scales is not None
        assert int8_cache.value_scales is not None
        key_step, value_step = (
            scales[:, :, :total].float().repeat_interleave(group, dim=1)[:, :, None]
            for scales in (int8_cache.key_scales, int8_cache.value_scales)
        )
        lengths = queries.view(rows.batch, rows.tokens, heads.query, heads.dim).abs().sum(-1).transpose(1, 2)[..., None]
        hidden = ~seen(rows, cache.past, None)[:, None]
        score_change = (params.scale * lengths * key_step / 2).masked_fill(hidden, 0.0).amax(-1)
        largest = cache.values[:, :, :total].abs().amax(dim=(2, 3)).repeat_interleave(group, dim=1)[..., None]
        bound = (torch.expm1(2 * score_change) * largest + value_step.masked_fill(hidden, 0.0).amax(-1) / 2).transpose(
            1, 2
        )
        difference = (actual - expected).abs().view(rows.batch, rows.tokens, heads.query, heads.dim).amax(-1)
        assert bool((difference <= bound * (1 + 1e-4)).all())


@pytest.mark.parametrize("part_name", ["key", "value"])
def test_what_is_no_number_stays_visible(impl: str, part_name: str) -> None:
    """Queries that see the slot get NaN, as with a float cache; other queries get finite numbers."""
    heads = HEADS["6:2x64"]
    for tokens in (1, 5, 40) if impl == "cpp" else (1, 5):
        queries, params, _, rows, cache = inputs(Draw(), heads, 2, tokens, 9, "none")
        part = cache.keys if part_name == "key" else cache.values
        part[1, 1, 3, 7] = float("inf")
        context = attention(queries, params, heads, rows, in_int8(cache), impl=impl).view(2, tokens, 2, 3 * 64)
        assert context[1, :, 1].isnan().all()
        assert context[0].isfinite().all()
        assert context[1, :, 0].isfinite().all()


@pytest.mark.parametrize("change", ["no scales", "other scales", "scales of floats"])
def test_scales_that_do_not_fit_are_refused(change: str) -> None:
    queries, params, heads, rows, cache = inputs(Draw(), HEADS["3x20"], 1, 1, 3, "none")
    scales = torch.zeros(1, 3, 7, dtype=torch.bfloat16)
    if change != "scales of floats":
        cache, scales = in_int8(cache), scales[:, :2]
    key_scales = None if change == "no scales" else scales
    with pytest.raises(ValueError, match=r"key_scales: expected (contiguous bfloat16 \[1, 3, 7\]|None with torch)"):
        attention(queries, params, heads, rows, replace(cache, key_scales=key_scales), impl="cpp")
