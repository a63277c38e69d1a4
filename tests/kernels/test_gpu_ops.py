"""The ops in Triton on a GPU compared with their references in float64: small odd sizes, and the sizes of GPT-J-6B."""

from dataclasses import replace

import pytest
import torch
from helpers.kernels.gpus import ON_GPU
from helpers.kernels.ops import DTYPES, WEIGHTS, Draw, distance, double, moved, rows_of

from labkit.kernels import attention, gemm, gpu, mlp_gemm, qkv_gemm
from labkit.kernels.attention import triton_impl as attention_impl
from labkit.kernels.attention.cases import SMALL, AttentionCase
from labkit.kernels.attention.reference import attention as attention_reference
from labkit.kernels.gemm import packed
from labkit.kernels.gemm.cases import cases_of
from labkit.kernels.gemm.reference import gemm as gemm_reference
from labkit.kernels.mlp_gemm.reference import mlp_gemm as mlp_reference
from labkit.kernels.qkv_gemm.reference import qkv_gemm as qkv_reference
from labkit.kernels.shapes import ODD, REAL, TOLERANCES, LayerShape
from labkit.kernels.types import AttentionParams, MlpWeights, QkvWeights

DEVICE = "cuda"
GPT_J = REAL[1]
STEPS = ((1, 1), (3, 1), (4, 5))  # sequences, new tokens: one row, a few rows, and torch's GEMM
PAST, CAPACITY = 4, 20
pytestmark = ON_GPU
each_type = pytest.mark.parametrize("dtype", WEIGHTS.values(), ids=WEIGHTS)
each_shape = pytest.mark.parametrize("shape", [*ODD, GPT_J], ids=lambda shape: shape.model)


@each_shape
@each_type
def test_gemm_equals_reference(dtype: torch.dtype, shape: LayerShape) -> None:
    draw = Draw(dtype)
    for case in cases_of(shape)[:2]:
        plain, _ = draw.linear(case.outputs, case.inputs, bias=case.bias)
        reference_linear, on_gpu = moved(plain, DEVICE), moved(packed(plain, "triton"), DEVICE)
        for batch, tokens in STEPS:
            x = draw.normal(batch * tokens, case.inputs).to(DEVICE)
            expected = gemm_reference(x.double(), double(reference_linear))
            assert distance(gemm(x, on_gpu, impl="triton"), expected) <= TOLERANCES[dtype]


@each_shape
@each_type
def test_mlp_equals_reference(dtype: torch.dtype, shape: LayerShape) -> None:
    draw = Draw(dtype)
    plain, _ = draw.linear(shape.intermediate, shape.hidden, bias="ff1" in shape.biases, gated=shape.gated)
    weights = moved(MlpWeights(draw.norm(shape.norm, shape.hidden), plain, shape.activation, shape.gated), DEVICE)
    on_gpu = replace(weights, up=packed(weights.up, "triton"))
    for batch, tokens in STEPS:
        rows = batch * tokens
        hidden, addend = (draw.normal(rows, shape.hidden).to(DEVICE) for _ in range(2))
        bias = draw.normal(shape.hidden).to(DEVICE)
        for from_norm in (False, True):
            expected = mlp_reference(hidden.double(), addend.double(), bias.double(), double(weights), from_norm)
            actual = mlp_gemm(hidden, addend, bias, on_gpu, residual_from_norm=from_norm, impl="triton")
            assert distance(actual[0], expected[0]) <= TOLERANCES[dtype]
            assert distance(actual[1], expected[1]) <= TOLERANCES[torch.float32]


@each_shape
@each_type
def test_qkv_equals_reference(dtype: torch.dtype, shape: LayerShape) -> None:
    draw, heads = Draw(dtype), shape.heads
    plain, _ = draw.linear((heads.query + 2 * heads.kv) * heads.dim, shape.hidden, bias="qkv" in shape.biases)
    weights = moved(QkvWeights(draw.norm(shape.norm, shape.hidden), plain), DEVICE)
    rotary = None
    if shape.rotary:
        rotary = moved(draw.rotary(shape.rotary, 40, interleaved=shape.interleaved), DEVICE)
    norms = [moved(1.0 + draw.normal(heads.dim, std=0.3), DEVICE) for _ in range(2)]
    for qkv in (weights, replace(weights, q_norm=norms[0], k_norm=norms[1], qk_eps=1e-6)):
        on_gpu = replace(qkv, proj=packed(qkv.proj, "triton"))
        for batch, tokens in STEPS:
            rows = moved(rows_of(batch, tokens, PAST), DEVICE)
            cache, original = (moved(kv, DEVICE) for kv in draw.cache(heads, rows, PAST, CAPACITY))
            expected_cache = double(original)
            hidden = draw.normal(batch * tokens, shape.hidden).to(DEVICE)
            expected, _ = qkv_reference(hidden.double(), double(qkv), heads, double(rotary), rows, expected_cache)
            actual, _ = qkv_gemm(hidden, on_gpu, heads, rotary, rows, cache, impl="triton")
            assert distance(actual, expected) <= TOLERANCES[dtype]
            new = (slice(None), slice(None), slice(PAST, PAST + tokens), slice(heads.dim))
            for slots, old, expected_slots in (
                (cache.keys, original.keys, expected_cache.keys),
                (cache.values, original.values, expected_cache.values),
            ):
                assert distance(slots[new], expected_slots[new]) <= TOLERANCES[dtype]
                slots[new] = old[new]
                assert torch.equal(slots.view(torch.uint8), old.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_attention_equals_reference(dtype: torch.dtype) -> None:
    """Repeated calls give the same bits: shares of a sequence arrive in any order, but are added in a fixed one."""
    draw = Draw(dtype)
    large = [AttentionCase(GPT_J, 1023), AttentionCase(GPT_J, 500, 77), AttentionCase(REAL[2], 2000, window=900)]
    large.append(AttentionCase(GPT_J, 0, 300, causal=False))
    for case in (*SMALL, *large):
        heads, total = case.shape.heads, case.past + case.tokens
        mask = torch.ones(3, total, dtype=torch.int64)
        mask[0, : total // 3] = mask[1, 1::3] = 0
        rows = moved(rows_of(3, case.tokens, case.past, mask=mask, slots=total + 300), DEVICE)
        cache, _ = draw.cache(heads, rows, total, total + 300)
        cache = replace(moved(cache, DEVICE), past=case.past)
        slopes = (2.0 ** -torch.linspace(1, 8, heads.query)).to(DEVICE) if case.shape.alibi else None
        params = AttentionParams(heads.dim**-0.5, case.window, slopes, case.causal)
        queries = draw.normal(3 * case.tokens, heads.query * heads.dim).to(DEVICE)
        expected = attention_reference(queries.double(), double(params), heads, rows, double(cache))
        assert distance(attention(queries, params, heads, rows, cache, impl="triton"), expected) <= TOLERANCES[dtype]
        partials = attention_impl.Partials.of(3, heads, queries.device)
        arguments = (queries, params, heads, rows, cache)
        first, *others = (
            attention_impl.attention(*arguments, torch.empty_like(queries), gpu.Launcher(), partials) for _ in range(20)
        )
        assert all(torch.equal(other, first) for other in others)
        assert not partials.arrived.any()
