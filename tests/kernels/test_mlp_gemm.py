"""Region 3: bias, residual, norm, first MLP matrix, activation."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers.kernels.clamped_products import assert_clamped_products, clamped_products
from helpers.kernels.ops import UNIT, WEIGHTS, Draw, assert_near, rounds_activations, tolerance

from labkit.kernels import mlp_gemm
from labkit.kernels.gemm import pack
from labkit.kernels.mlp_gemm import mlp
from labkit.kernels.types import NO_NORM, PLAIN_ACTIVATIONS, MlpWeights

HIDDEN, INNER = 63, 100
ROWS = [1, 5, 13, 33]
pytestmark = pytest.mark.usefixtures("poisoned", "isa")


def act_tolerance(dtype: torch.dtype) -> float:
    """Tolerance of `act`: it enters the next product, so it is rounded like a row; fast exp and erf are exact to about
    1e-6.
    """
    return 2 * tolerance(dtype, roundings=4) + (UNIT[dtype] if rounds_activations(dtype) else 0.0)


NORMS_AND_ACTIVATIONS = [*product(["layer"], PLAIN_ACTIVATIONS), ("rms", "silu"), ("none", "relu")]


@pytest.mark.parametrize(
    ("norm", "activation", "gated"),
    [*((*kinds, gated) for kinds in NORMS_AND_ACTIVATIONS for gated in (False, True)), ("rms", "clamped_swiglu", True)],
)
@pytest.mark.parametrize("dtype", WEIGHTS.values(), ids=WEIGHTS)
def test_cpp_equals_reference(dtype: torch.dtype, norm: str, activation: str, gated: bool) -> None:
    draw = Draw(dtype)
    plain, packed = draw.linear(INNER, HIDDEN, gated=gated)
    norm_weights, addend_norm = draw.norm(norm, HIDDEN), draw.norm(norm if gated else "none", HIDDEN)
    bias = draw.normal(HIDDEN)
    for rows in ROWS:
        hidden, addend = draw.normal(rows, HIDDEN), draw.normal(rows, HIDDEN)
        for added, added_bias, from_norm in ((addend, bias, False), (addend, None, True), (None, None, False)):
            arguments = (hidden, added, added_bias)
            expected = mlp_gemm(
                *arguments,
                MlpWeights(norm_weights, plain, activation, gated, addend_norm),
                residual_from_norm=from_norm,
                impl="reference",
            )
            actual = mlp_gemm(
                *arguments,
                MlpWeights(norm_weights, packed, activation, gated, addend_norm),
                residual_from_norm=from_norm,
                impl="cpp",
            )
            assert_near(actual[0][:, :INNER], expected[0], 1.0 + expected[0].abs().max(), act_tolerance(dtype))
            assert_near(actual[1], expected[1], 1.0 + expected[1].abs().max(), 2e-6)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("dtype", WEIGHTS.values(), ids=WEIGHTS)
def test_a_whole_mlp_equals_the_reference(dtype: torch.dtype, gated: bool) -> None:
    draw = Draw(dtype)
    plain, packed = draw.linear(INNER, HIDDEN, gated=gated)
    plain_down, packed_down = draw.linear(HIDDEN + 2, INNER)
    norm = draw.norm("rms", HIDDEN)
    for rows in ROWS:
        hidden = draw.normal(rows, HIDDEN)
        expected = mlp(hidden, MlpWeights(norm, plain, "silu", gated), plain_down, impl="reference")
        actual = mlp(hidden, MlpWeights(norm, packed, "silu", gated), packed_down, threads=2, impl="cpp")
        assert_near(actual, expected, 1.0 + expected.abs().max(), 2 * act_tolerance(dtype))


def test_matrices_of_an_mlp_that_do_not_fit_each_other_are_refused() -> None:
    draw = Draw()
    plain, packed = draw.linear(INNER, HIDDEN, gated=True)
    _, down = draw.linear(HIDDEN, INNER + 32)
    weights = MlpWeights(draw.norm("none", HIDDEN), packed, "silu", gated=True)
    with pytest.raises(ValueError, match=r"got down\.inputs = 132, expected 112: the outputs of the first matrix"):
        mlp(draw.normal(1, HIDDEN), weights, down, impl="cpp")
    plain_weights, (plain_down, _) = replace(weights, up=plain), draw.linear(HIDDEN, INNER)
    with pytest.raises(ValueError, match="expected 'cpp' or 'reference'"):
        mlp(draw.normal(1, HIDDEN), plain_weights, plain_down, impl="triton")


def test_padding_columns_of_a_gated_matrix_are_zero() -> None:
    draw = Draw()
    _, packed = draw.linear(INNER, HIDDEN, gated=True)
    weights = MlpWeights(draw.norm("rms", HIDDEN), packed, "silu", gated=True)
    act, _ = mlp_gemm(draw.normal(5, HIDDEN), None, None, weights, impl="cpp")
    assert act.shape == (5, 112)
    assert not act[:, INNER:].any()


def test_the_clamped_product_holds_over_its_whole_range() -> None:
    """As transformers computes GPT-OSS' experts. A NaN of gate or up stays a NaN."""
    x, expected = clamped_products()
    _, packed = Draw().linear(2, 2, bias=False, gated=True)
    weights = replace(packed, weight=pack(*torch.eye(2).chunk(2)))  # the gate is the first number, up the second
    act, _ = mlp_gemm(x, None, None, MlpWeights(NO_NORM, weights, "clamped_swiglu", gated=True), impl="cpp")
    assert_clamped_products(act[:, :1], expected)


@pytest.mark.parametrize("activation", PLAIN_ACTIVATIONS)
def test_activations_hold_over_their_whole_range(activation: str) -> None:
    """One input with weight 1: act is the activation itself, from underflow to overflow of exp."""
    x = torch.cat((torch.linspace(-100, 100, 4001), torch.tensor([0.0, -0.0, 1e-20, -1e-20, 3e4, -3e4])))[:, None]
    draw = Draw()
    plain, packed = draw.linear(1, 1, bias=False)
    plain.weight.fill_(1.0)
    packed.weight.zero_().view(-1)[0] = 1.0
    expected, _ = mlp_gemm(x, None, None, MlpWeights(draw.norm("none", 1), plain, activation), impl="reference")
    actual, _ = mlp_gemm(x, None, None, MlpWeights(draw.norm("none", 1), packed, activation), impl="cpp")
    assert_near(actual[:, :1], expected, 1.0 + x.abs(), 1e-6)


@pytest.mark.parametrize("activation", PLAIN_ACTIVATIONS)
def test_a_nan_stays_a_nan(activation: str) -> None:
    draw = Draw()
    _, packed = draw.linear(33, 20)
    hidden = draw.normal(2, 20)
    hidden[1, 7] = float("nan")
    act, _ = mlp_gemm(hidden, None, None, MlpWeights(draw.norm("none", 20), packed, activation), impl="cpp")
    assert act[0].isfinite().all()
    assert act[1, :33].isnan().all()
