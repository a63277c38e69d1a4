"""Region 1: norm, Q, K, V product, head norms, rotation, append to the KV cache."""

from dataclasses import replace

import pytest
import torch
from helpers.kernels.ops import UNIT, WEIGHTS, Draw, assert_near, rows_of, tolerance

from labkit.kernels import qkv_gemm
from labkit.kernels.types import Heads, LayerCache, QkvWeights, Rotary

HIDDEN, PAST, CAPACITY = 63, 4, 20
HEADS = {"3x20": Heads(3, 3, 20), "6:2x64": Heads(6, 2, 64), "2:1x80": Heads(2, 1, 80)}
ROTARY = {  # share of the head; whether pairs are next to each other
    "no-rotary": None,
    "halves": (1.0, False),
    "pairs": (1.0, True),
    "some-halves": (0.3, False),
    "some-pairs": (0.4, True),
}
STEPS = [(1, 1), (5, 1), (2, 13)]  # sequences, new tokens
pytestmark = pytest.mark.usefixtures("poisoned", "isa")


@pytest.mark.parametrize("head_norms", [False, True], ids=["", "head-norms"])
@pytest.mark.parametrize("rotary", ROTARY.values(), ids=ROTARY)
@pytest.mark.parametrize("dtype", WEIGHTS.values(), ids=WEIGHTS)
def test_cpp_equals_reference(dtype: torch.dtype, rotary: tuple[float, bool] | None, head_norms: bool) -> None:
    for heads in HEADS.values():
        assert_cpp_equals_reference(dtype, heads, rotary, head_norms)


def assert_cpp_equals_reference(
    dtype: torch.dtype, heads: Heads, rotary: tuple[float, bool] | None, head_norms: bool
) -> None:
    draw = Draw(dtype)
    outputs = (heads.query + 2 * heads.kv) * heads.dim
    plain, packed = draw.linear(outputs, HIDDEN)
    weights = QkvWeights(draw.norm("layer", HIDDEN), plain)
    if head_norms:
        q_norm, k_norm = (1.0 + draw.normal(heads.dim, std=0.3) for _ in range(2))
        weights = replace(weights, q_norm=q_norm, k_norm=k_norm, qk_eps=1e-6)
    tables = None
    if rotary is not None:
        tables = draw.rotary(int(heads.dim * rotary[0]) // 2 * 2, 40, interleaved=rotary[1])
    for (batch, tokens), from_norm in zip(STEPS, (False, True, False), strict=True):
        rows = rows_of(batch, tokens, PAST)
        hidden = draw.normal(batch * tokens, HIDDEN)
        expected_cache, cache = draw.cache(heads, rows, PAST, CAPACITY)
        options = {"residual_from_norm": from_norm}
        expected = qkv_gemm(hidden, weights, heads, tables, rows, expected_cache, **options, impl="reference")
        actual = qkv_gemm(hidden, replace(weights, proj=packed), heads, tables, rows, cache, **options, impl="cpp")
        scale = 4.0 + expected[0].abs().max()
        assert_near(actual[0], expected[0], scale, tolerance(dtype))
        assert_near(actual[1], expected[1], 4.0, 2e-6)
        for slots, expected_slots in ((cache.keys, expected_cache.keys), (cache.values, expected_cache.values)):
            assert_cache_near(slots, expected_slots, heads, tokens, tolerance(dtype) + 2 * UNIT[dtype])


@pytest.mark.parametrize("impl", ["cpp", "reference"])
def test_a_layer_reads_its_own_table(impl: str) -> None:
    """As if the others were not there."""
    draw, heads, rows = Draw(), HEADS["3x20"], rows_of(2, 3, PAST)
    plain, packed = draw.linear(180, HIDDEN)
    several = [draw.rotary(20, 40, interleaved=False) for _ in range(3)]
    cosine, sine = torch.stack([one.cosine for one in several]), torch.stack([one.sine for one in several])
    tables = Rotary(cosine, sine, interleaved=False)
    weights = QkvWeights(draw.norm("layer", HIDDEN), packed if impl == "cpp" else plain)
    hidden = draw.normal(6, HIDDEN)
    for number, table in enumerate(several):
        _, cache = draw.cache(heads, rows, PAST, CAPACITY)
        expected, _ = qkv_gemm(hidden, weights, heads, table, rows, cache, impl=impl)
        actual, _ = qkv_gemm(hidden, replace(weights, table=number), heads, tables, rows, cache, impl=impl)
        assert torch.equal(actual, expected)
    with pytest.raises(ValueError, match="got table 3 of a rotary embedding with 3"):
        qkv_gemm(hidden, replace(weights, table=3), heads, tables, rows, cache, impl=impl)


@pytest.mark.parametrize("dtype", WEIGHTS.values(), ids=WEIGHTS)
def test_norms_over_all_heads_equal_the_reference(dtype: torch.dtype) -> None:
    draw, heads = Draw(dtype), HEADS["6:2x64"]
    plain, packed = draw.linear(640, HIDDEN)
    q_norm, k_norm = 1.0 + draw.normal(384, std=0.3), 1.0 + draw.normal(128, std=0.3)
    weights = QkvWeights(draw.norm("rms", HIDDEN), plain, q_norm, k_norm, qk_eps=1e-6, whole_norms=True)
    tables = draw.rotary(64, 40, interleaved=False)
    for batch, tokens in STEPS:
        rows = rows_of(batch, tokens, PAST)
        hidden = draw.normal(batch * tokens, HIDDEN)
        expected_cache, cache = draw.cache(heads, rows, PAST, CAPACITY)
        expected, _ = qkv_gemm(hidden, weights, heads, tables, rows, expected_cache, impl="reference")
        actual, _ = qkv_gemm(hidden, replace(weights, proj=packed), heads, tables, rows, cache, threads=2, impl="cpp")
        assert_near(actual, expected, 4.0 + expected.abs().max(), tolerance(dtype))
        assert_cache_near(cache.keys, expected_cache.keys, heads, tokens, tolerance(dtype) + 2 * UNIT[dtype])


def assert_cache_near(
    actual: torch.Tensor, expected: torch.Tensor, heads: Heads, tokens: int, tolerance: float
) -> None:
    """Checks slots: equal before `past`, near in the new slots with zeros past the head, untouched after them."""
    new, after = slice(PAST, PAST + tokens), slice(PAST + tokens, CAPACITY)
    assert torch.equal(actual[:, :, :PAST], expected[:, :, :PAST])
    expected_new = expected[:, :, new, : heads.dim].float()
    assert_near(actual[:, :, new, : heads.dim].float(), expected_new, 4.0 + expected_new.abs().max(), tolerance)
    assert not actual[:, :, new, heads.dim :].any()
    assert actual[:, :, after].isnan().all()


@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_tokens_beyond_the_cache_are_refused(impl: str) -> None:
    draw, heads = Draw(), HEADS["3x20"]
    plain, packed = draw.linear(180, HIDDEN)
    weights = QkvWeights(draw.norm("layer", HIDDEN), packed if impl == "cpp" else plain)
    cache = LayerCache(torch.zeros(1, 3, 8, 32), torch.zeros(1, 3, 8, 32), 6)
    with pytest.raises(ValueError, match="cache of 8 slots can't take 3 tokens after 6; grow it"):
        qkv_gemm(draw.normal(3, HIDDEN), weights, heads, None, rows_of(1, 3, 6), cache, impl=impl)
