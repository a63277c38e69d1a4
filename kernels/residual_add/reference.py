"""Reference: one torch op per addend."""

from torch import Tensor

from ..plain import normalise
from ..types import NO_NORM, Norm


def residual_add(
    residual: Tensor,
    mlp_out: Tensor,
    mlp_bias: Tensor | None,
    attn_out: Tensor | None = None,
    attn_bias: Tensor | None = None,
    mlp_norm: Norm = NO_NORM,
) -> Tensor:
    if attn_out is not None:
        residual = residual + (attn_out if attn_bias is None else attn_out + attn_bias)
    return residual + normalise(mlp_norm, mlp_out if mlp_bias is None else mlp_out + mlp_bias)
