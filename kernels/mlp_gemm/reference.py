"""Reference: the unfused sequence (bias, residual, norm, GEMM, bias, activation, and the product of a gated MLP)."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from ..plain import linear, normalise
from ..types import Linear, MlpWeights

ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "relu_squared": lambda x: F.relu(x).square(),
}
SWIGLU_SLOPE, SWIGLU_LIMIT = 1.702, 7.0  # of "clamped_swiglu", see `MlpWeights`


def mlp_gemm(
    hidden: Tensor,
    addend: Tensor | None,
    addend_bias: Tensor | None,
    weights: MlpWeights,
    residual_from_norm: bool = False,
    multiply: Callable[[Tensor, Linear], Tensor] = linear,
) -> tuple[Tensor, Tensor]:
    if addend is not None:
        addend = addend if addend_bias is None else addend + addend_bias
        hidden = hidden + normalise(weights.addend_norm, addend)
    normed = normalise(weights.norm, hidden)
    wide = multiply(normed, weights.up)
    act = (
        gated_product(weights.activation, *wide.chunk(2, dim=-1))
        if weights.gated
        else ACTIVATION[weights.activation](wide)
    )
    return act, normed if residual_from_norm else hidden


def gated_product(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """activation(gate) * up, or the clamped product of GPT-OSS."""
    if activation != "clamped_swiglu":
        return ACTIVATION[activation](gate) * up
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * (SWIGLU_SLOPE * gate).sigmoid() * (up + 1)


def mlp(hidden: Tensor, weights: MlpWeights, down: Linear) -> Tensor:
    act, _ = mlp_gemm(hidden, None, None, weights)
    return linear(act, down)
