"""Region 4: output bias + residual (+ the attention output of a parallel residual)."""

from ctypes import byref

import torch
from torch import Tensor

from labkit.system.errors import UserError

from .. import build, gpu
from ..build import INT, LONG, POINTER
from ..checks import checked, floats, maybe, norm
from ..types import NO_NORM, Norm, pointer
from .reference import residual_add as reference

__all__ = ["residual_add"]

build.declare("labkit_residual_add", *[POINTER] * 6, LONG, LONG, POINTER, INT, allocates=True)


@checked(
    residual=floats("rows", "width"),
    mlp_out=floats("rows", "width"),
    mlp_bias=maybe(floats("width")),
    attn_out=maybe(floats("rows", "width")),
    attn_bias=maybe(floats("width")),
    mlp_norm=norm,
)
def residual_add(
    residual: Tensor,
    mlp_out: Tensor,
    mlp_bias: Tensor | None,
    attn_out: Tensor | None = None,
    attn_bias: Tensor | None = None,
    mlp_norm: Norm = NO_NORM,
    *,
    threads: int = 1,
    impl: str,
) -> Tensor:
    """[N, H] float32 each -> residual + attn_out + attn_bias + mlp_norm(mlp_out + mlp_bias) [N, H].

    Biases are [H] or None. With a norm there is no attn_out.
    """
    if mlp_norm.kind != "none" and attn_out is not None:
        raise UserError("got attn_out and mlp_norm, expected one of them: only an MLP's own output is normed")
    if impl == "reference":
        return reference(residual, mlp_out, mlp_bias, attn_out, attn_bias, mlp_norm)
    out = torch.empty_like(residual)
    if impl == "cpp":
        build.in_use("float32").labkit_residual_add(
            pointer(residual),
            pointer(attn_out),
            pointer(attn_bias),
            pointer(mlp_out),
            pointer(mlp_bias),
            byref(mlp_norm.c),
            residual.shape[0],
            residual.shape[1],
            pointer(out),
            threads,
        )
        return out
    gpu.require()
    from .triton_impl import add_normed, add_rows

    if mlp_norm.kind != "none":
        return add_normed(residual, mlp_out, mlp_bias, mlp_norm, out, gpu.default_launcher())
    return add_rows([residual, attn_out, mlp_out], [attn_bias, mlp_bias], out, gpu.default_launcher())
