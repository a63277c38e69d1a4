"""The ops in Triton's interpreter compared with their references in float64.

Most kernels have three paths: one row of activations, a few rows, and more rows than one pass over a weight takes.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers.kernels.clamped_products import assert_clamped_products, clamped_products
from helpers.kernels.gpus import INTERPRETED
from helpers.kernels.ops import QUANTISED, WEIGHTS, Draw, distance, double, rows_of
from helpers.sweeps import numbered, paired, sweep, swept

from labkit.kernels import gemm, gpu, mlp_gemm, qkv_gemm, residual_add
from labkit.kernels.gemm import cases as gemm_cases
from labkit.kernels.gemm import packed, unpack_rows
from labkit.kernels.gemm.reference import gemm as gemm_reference
from labkit.kernels.gemm.triton_impl import gemm as fused_gemm
from labkit.kernels.mlp_gemm import cases as mlp_cases
from labkit.kernels.mlp_gemm.reference import mlp_gemm as mlp_reference
from labkit.kernels.mlp_gemm.triton_impl import mlp_gemm as fused_mlp_gemm
from labkit.kernels.plain import normalise
from labkit.kernels.qkv_gemm import cases as qkv_cases
from labkit.kernels.qkv_gemm.reference import qkv_gemm as qkv_reference
from labkit.kernels.qkv_gemm.triton_impl import qkv_gemm as fused_qkv_gemm
from labkit.kernels.residual_add import cases as residual_cases
from labkit.kernels.residual_add.reference import residual_add as residual_reference
from labkit.kernels.shapes import TOLERANCES
from labkit.kernels.tuned import Tile
from labkit.kernels.types import NO_NORM, PLAIN_ACTIVATIONS, Heads, Linear, MlpWeights, QkvWeights, Rotary

ROWS = (1, 3, 20)
STEPS = ((1, 1), (3, 1), (4, 5))  # sequences, new tokens; their product is the number of rows
PAST, CAPACITY = 4, 20
FLOAT32 = TOLERANCES[torch.float32]
SMALL_TILE, FLAT_TILE, WHOLE_ROWS = Tile(16, 16, stages=2), Tile(32, 64), Tile(32, 128)
pytestmark = [pytest.mark.usefixtures("poisoned"), *INTERPRETED]
each_type = pytest.mark.parametrize("dtype", WEIGHTS.values(), ids=WEIGHTS)
in_other_tiles = pytest.mark.parametrize(
    ("dtype", "tile"),
    [
        pytest.param(torch.float32, SMALL_TILE, id="fp32-16x16"),
        pytest.param(torch.float32, WHOLE_ROWS, id="fp32-32x128"),
        pytest.param(torch.int8, FLAT_TILE, id="int8-32x64", marks=sweep),
        pytest.param(torch.float32, FLAT_TILE, id="fp32-32x64", marks=sweep),
        pytest.param(torch.int8, SMALL_TILE, id="int8-16x16", marks=sweep),
    ],
    indirect=["tile"],
)


@pytest.fixture
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tile:
    """A tile small enough for several programs, each with several steps."""
    monkeypatch.setattr(gpu, "default_tile", lambda *_: request.param)
    return request.param


def check_gemm(draw: Draw, case: gemm_cases.GemmCase, counts: Sequence[int]) -> None:
    plain, _ = draw.linear(case.outputs, case.inputs, bias=case.bias)
    for rows in counts:
        x = draw.normal(rows, case.inputs)
        actual = gemm(x, packed(plain, "triton"), impl="triton")
        assert distance(actual, gemm_reference(x.double(), double(plain))) <= TOLERANCES[draw.dtype]


@pytest.mark.parametrize(("dtype", "case"), paired(WEIGHTS, numbered(gemm_cases.SMALL)))
def test_gemm_equals_reference(dtype: torch.dtype, case: gemm_cases.GemmCase) -> None:
    for groups in (1, 3) if dtype == torch.int8 else (1,):
        check_gemm(Draw(dtype, groups=groups), case, ROWS)


@pytest.mark.parametrize("stored", QUANTISED)
def test_gemm_of_each_kind_of_codes_equals_reference(stored: str) -> None:
    """Groups divide an eighth of 1,024 inputs, so scales are spread over a tile; this is not so for 200 inputs."""
    draw = Draw(torch.int8, **QUANTISED[stored])
    for inputs in (1024, 200):
        plain, _ = draw.linear(70, inputs, bias=True)
        for rows in ROWS:
            x = draw.normal(rows, inputs)
            actual = gemm(x, packed(plain, "triton"), impl="triton")
            assert distance(actual, gemm_reference(x.double(), double(plain))) <= TOLERANCES[torch.int8]


@in_other_tiles
@pytest.mark.usefixtures("tile")
def test_gemm_in_other_tiles_equals_reference(dtype: torch.dtype) -> None:
    for case in gemm_cases.SMALL[6:8]:
        check_gemm(Draw(dtype, groups=3), case, (1, 16))


@each_type
def test_gemm_with_norm_second_product_residual_and_cap_equals_reference(dtype: torch.dtype) -> None:
    """norm(x) W^T + bias + x2 W2^T + bias2 + residual, in one kernel up to 16 rows."""
    draw = Draw(dtype, groups=3)
    (first_linear, _), (second_linear, _) = (draw.linear(70, inputs, bias=False) for inputs in (63, 130))
    norm, bias, bias2 = draw.norm("layer", 63), draw.normal(70), draw.normal(70)
    for rows in ROWS:
        x, x2, residual = draw.normal(rows, 63), draw.normal(rows, 130), draw.normal(rows, 70)
        first = gemm_reference(normalise(double(norm), x.double()), double(first_linear))
        second = gemm_reference(x2.double(), double(second_linear))
        launch, out = gpu.Launcher(), torch.empty(rows, 70)
        weights, weights2 = packed(first_linear, "triton"), packed(second_linear, "triton")
        also = (x2, weights2, bias2)
        fused_gemm(x, weights, out, launch, bias=bias, norm=norm, also=also, residual=residual)
        assert distance(out, first + bias + second + bias2 + residual) <= TOLERANCES[dtype]
        assert launch.launched == ["gemm" if rows <= gpu.FEW_ROWS else "add_rows"]
        fused_gemm(x, weights, out, launch, cap=1.5)
        expected = 1.5 * torch.tanh(gemm_reference(x.double(), double(first_linear)) / 1.5)
        assert distance(out, expected) <= TOLERANCES[dtype]
        fused_gemm(x, weights, out, launch, norm=norm, also=(x2, weights2, None))
        assert distance(out, first + second) <= TOLERANCES[dtype]


def check_mlp(draw: Draw, case: mlp_cases.MlpCase, counts: Sequence[int]) -> None:
    shape = case.shape
    plain, _ = draw.linear(shape.intermediate, shape.hidden, bias="ff1" in shape.biases, gated=shape.gated)
    addend_norm = draw.norm(shape.norm if shape.gated else "none", shape.hidden)
    weights = MlpWeights(draw.norm(shape.norm, shape.hidden), plain, shape.activation, shape.gated, addend_norm)
    on_gpu = replace(weights, up=packed(plain, "triton"))
    for rows in counts:
        hidden, addend = draw.normal(rows, shape.hidden), draw.normal(rows, shape.hidden)
        bias = draw.normal(shape.hidden)
        for added, added_bias, from_norm in ((addend, bias, False), (addend, None, True), (None, None, False)):
            expected = mlp_reference(double(hidden), double(added), double(added_bias), double(weights), from_norm)
            actual = mlp_gemm(hidden, added, added_bias, on_gpu, residual_from_norm=from_norm, impl="triton")
            assert distance(actual[0], expected[0]) <= TOLERANCES[draw.dtype]
            assert distance(actual[1], expected[1]) <= FLOAT32


@pytest.mark.parametrize("asymmetric", [False, True])
def test_mlp_without_a_norm_equals_reference(asymmetric: bool) -> None:
    """The addend's bias is added to no column that only fills a tile: here a part of a row is 96 codes wide."""
    draw = Draw(torch.int8, bits=4, group=32, asymmetric=asymmetric)
    plain, _ = draw.linear(70, 768, bias=False)
    weights = MlpWeights(draw.norm("none", 768), plain, "relu")
    hidden, addend, bias = draw.normal(3, 768), draw.normal(3, 768), draw.normal(768)
    expected = mlp_reference(double(hidden), double(addend), double(bias), double(weights))
    actual = mlp_gemm(hidden, addend, bias, replace(weights, up=packed(plain, "triton")), impl="triton")
    assert distance(actual[0], expected[0]) <= TOLERANCES[torch.int8]


@pytest.mark.parametrize(("dtype", "case"), paired(WEIGHTS, numbered(mlp_cases.SMALL)))
def test_mlp_equals_reference(dtype: torch.dtype, case: mlp_cases.MlpCase) -> None:
    check_mlp(Draw(dtype, groups=3), case, ROWS)


@in_other_tiles
@pytest.mark.usefixtures("tile")
def test_mlp_in_other_tiles_equals_reference(dtype: torch.dtype) -> None:
    """All programs write a share of the residual; there are more programs than shares, and fewer."""
    for case in mlp_cases.SMALL[1::2]:
        check_mlp(Draw(dtype, groups=3), case, (1, 16))


def test_the_clamped_product_holds_over_its_whole_range() -> None:
    """Few rows at a time, and many. A NaN of gate or up stays a NaN."""
    x, expected = clamped_products()
    weights = MlpWeights(NO_NORM, Linear(torch.eye(2), None, 2, 2, "rows"), "clamped_swiglu", gated=True)
    for rows in (x[:9], x):
        act, _ = mlp_gemm(rows, None, None, weights, impl="triton")
        assert_clamped_products(act, expected[: len(rows)])


@pytest.mark.parametrize("activation", PLAIN_ACTIVATIONS)
def test_activations_hold_over_their_whole_range(activation: str) -> None:
    """One input, 1: act is the activation of the weights, from underflow to overflow of exp. A NaN stays NaN."""
    values = torch.cat((torch.linspace(-100, 100, 401), torch.tensor([-0.0, 1e-20, -1e-20, 3e4, -3e4])))
    weights = MlpWeights(Draw().norm("none", 1), Linear(values[:, None], None, 406, 1, "rows"), activation)
    unit = torch.ones(1, 1)
    actual, _ = mlp_gemm(unit, None, None, weights, impl="triton")
    expected, _ = mlp_reference(unit.double(), None, None, double(weights))
    assert ((actual - expected).abs() <= 1e-6 * (1.0 + values.abs())).all()
    for rows in ROWS:
        hidden = torch.ones(rows, 1)
        hidden[-1] = float("nan")
        act, _ = mlp_gemm(hidden, None, None, weights, impl="triton")
        assert act[:-1].isfinite().all()
        assert act[-1].isnan().all()


def check_qkv(draw: Draw, weights: QkvWeights, heads: Heads, rotary: Rotary | None) -> None:
    """Checks queries, residual and cache; only the heads of the new slots may be written in the cache."""
    hidden_size = weights.proj.inputs
    on_gpu = replace(weights, proj=packed(weights.proj, "triton"))
    for (batch, tokens), from_norm in zip(STEPS, (False, True, True), strict=True):
        rows, hidden = rows_of(batch, tokens, PAST), draw.normal(batch * tokens, hidden_size)
        cache, original = draw.cache(heads, rows, PAST, CAPACITY)
        expected_cache = double(original)
        expected = qkv_reference(
            double(hidden), double(weights), heads, double(rotary), rows, expected_cache, from_norm
        )
        actual = qkv_gemm(hidden, on_gpu, heads, rotary, rows, cache, residual_from_norm=from_norm, impl="triton")
        assert distance(actual[0], expected[0]) <= TOLERANCES[draw.dtype]
        assert distance(actual[1], expected[1]) <= FLOAT32
        new = (slice(None), slice(None), slice(PAST, PAST + tokens), slice(heads.dim))
        for slots, old, expected_slots in (
            (cache.keys, original.keys, expected_cache.keys),
            (cache.values, original.values, expected_cache.values),
        ):
            assert distance(slots[new], expected_slots[new]) <= TOLERANCES[draw.dtype]
            slots[new] = old[new]
            assert torch.equal(slots.view(torch.uint8), old.view(torch.uint8))


def qkv_weights(draw: Draw, case: qkv_cases.QkvCase) -> QkvWeights:
    shape = case.shape
    plain, _ = draw.linear(case.outputs, shape.hidden, bias="qkv" in shape.biases)
    return QkvWeights(draw.norm(shape.norm, shape.hidden), plain)


def with_head_norms(draw: Draw, weights: QkvWeights, heads: Heads) -> QkvWeights:
    q_norm, k_norm = (1.0 + draw.normal(heads.dim, std=0.3) for _ in range(2))
    return replace(weights, q_norm=q_norm, k_norm=k_norm, qk_eps=1e-6)


@pytest.mark.parametrize(("dtype", "case"), paired(WEIGHTS, numbered(qkv_cases.SMALL)))
def test_qkv_equals_reference(dtype: torch.dtype, case: qkv_cases.QkvCase) -> None:
    draw = Draw(dtype, groups=3)
    shape, weights = case.shape, qkv_weights(draw, case)
    rotary = draw.rotary(shape.rotary, 40, interleaved=shape.interleaved) if shape.rotary else None
    check_qkv(draw, weights, shape.heads, rotary)
    check_qkv(draw, with_head_norms(draw, weights, shape.heads), shape.heads, rotary)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("turned", swept([2, 12, 34], ["12"]))
def test_qkv_turns_any_share_of_a_head(turned: int, interleaved: bool) -> None:
    draw, case = Draw(), qkv_cases.SMALL[2]
    weights, heads = qkv_weights(draw, case), case.shape.heads
    rotary = draw.rotary(turned, 40, interleaved=interleaved)
    check_qkv(draw, weights, heads, rotary)
    check_qkv(draw, with_head_norms(draw, weights, heads), heads, rotary)


@sweep
@in_other_tiles
@pytest.mark.usefixtures("tile")
def test_qkv_in_other_tiles_equals_reference(dtype: torch.dtype) -> None:
    draw, case = Draw(dtype, groups=3), qkv_cases.SMALL[1]
    check_qkv(draw, qkv_weights(draw, case), case.shape.heads, draw.rotary(12, 40, interleaved=False))


def test_qkv_refuses_heads_of_an_odd_size() -> None:
    draw, heads, rows = Draw(), Heads(2, 2, 7), rows_of(1, 1, PAST)
    plain, _ = draw.linear(42, 30)
    cache, _ = draw.cache(heads, rows, PAST, CAPACITY)
    with pytest.raises(ValueError, match="head_dim is 7; the triton kernels take even sizes up to 256"):
        qkv_gemm(draw.normal(1, 30), QkvWeights(draw.norm("rms", 30), plain), heads, None, rows, cache, impl="triton")


def test_up_to_16_rows_are_one_kernel() -> None:
    draw, case = Draw(), qkv_cases.SMALL[0]
    weights, heads = qkv_weights(draw, case), case.shape.heads
    plain, _ = draw.linear(50, 63)
    mlp = MlpWeights(weights.norm, plain, "relu")
    for count in (1, 16, 17):
        few = count <= gpu.FEW_ROWS
        rows, hidden, launch = rows_of(count, 1, PAST), draw.normal(count, 63), gpu.Launcher()
        cache, _ = draw.cache(heads, rows, PAST, CAPACITY)
        fused_qkv_gemm(hidden, weights, heads, None, rows, cache, torch.empty(count, 60), None, launch)
        fused_mlp_gemm(hidden, hidden, None, mlp, torch.empty(count, 50), None, launch)
        assert launch.launched == (["qkv_gemm", "mlp_gemm"] if few else ["finish_heads", "add_rows", "activate"])


def test_residual_add_equals_reference() -> None:
    draw = Draw()
    for case, rows in product(residual_cases.SMALL, ROWS):
        hidden = case.shape.hidden
        residual, mlp_out, attn_out = (draw.normal(rows, hidden) for _ in range(3))
        mlp_bias, attn_bias = draw.normal(hidden), draw.normal(hidden)
        for arguments in (
            (residual, mlp_out, mlp_bias),
            (residual, mlp_out, None),
            (residual, mlp_out, mlp_bias, attn_out, attn_bias),
            (residual, mlp_out, None, attn_out, None),
        ):
            expected = residual_reference(*(double(part) for part in arguments))
            assert distance(residual_add(*arguments, impl="triton"), expected) <= FLOAT32


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("inputs", swept([1, 2, 7, 33, 64, 130], ["1", "33", "130"]))
def test_words_hold_the_same_matrix(inputs: int, groups: int) -> None:
    plain, _ = Draw(torch.int8, groups=groups).linear(35, inputs)
    words, order = packed(plain, "triton"), torch.tensor([34, 0, 7])
    assert words.on_gpu.shape == (35, -(-inputs // 4), 1)
    assert torch.equal(words.floats(), plain.floats())
    assert torch.equal(unpack_rows(words, order), plain.floats()[order])


def test_floating_weights_stay_as_they_are() -> None:
    plain, _ = Draw(torch.float16).linear(3, 4)
    assert packed(plain, "triton") is plain
    assert plain.on_gpu is plain.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_weights_in_another_layout_are_refused(dtype: torch.dtype) -> None:
    plain, panels = Draw(dtype).linear(3, 4)
    wrong, right = (plain, "words") if dtype == torch.int8 else (panels, "rows")
    with pytest.raises(
        ValueError, match=f"take {wrong.weight_type} weights with layout '{right}', got '{wrong.layout}'"
    ):
        gemm(torch.zeros(1, 4), wrong, impl="triton")
