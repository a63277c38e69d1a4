"""Region 3: attention bias + residual + norm + first MLP matrix + bias + activation."""

from ctypes import byref

import torch
from torch import Tensor

from labkit.system.errors import UserError

from .. import build, gpu
from ..build import INT, LONG, POINTER
from ..checks import checked, flag, floats, maybe
from ..types import Linear, MlpWeights, pointer
from .mlp_checks import mlp_down, mlp_weights
from .reference import mlp as whole_reference
from .reference import mlp_gemm as reference

__all__ = ["mlp", "mlp_gemm"]

build.declare("labkit_mlp_gemm", *[POINTER] * 4, INT, LONG, POINTER, POINTER, INT, allocates=True)
build.declare("labkit_mlp", *[POINTER] * 3, LONG, POINTER, INT, allocates=True)


@checked(
    weights=mlp_weights,
    hidden=floats("rows", "width"),
    addend=maybe(floats("rows", "width")),
    addend_bias=maybe(floats("width")),
    residual_from_norm=flag,
)
def mlp_gemm(
    hidden: Tensor,
    addend: Tensor | None,
    addend_bias: Tensor | None,
    weights: MlpWeights,
    *,
    residual_from_norm: bool = False,
    threads: int = 1,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """hidden, addend [N, H] float32 -> (act [N, >= I], residual [N, H]).

    residual = hidden + addend_norm(addend + addend_bias) (or its norm, `residual_from_norm`);
    act = activation(norm(sum) W^T + b), gated: activation(gate) * up. Columns of act past the true I (padding of an
    interleaved gated matrix) are zero.
    """
    if impl == "reference":
        return reference(hidden, addend, addend_bias, weights, residual_from_norm)
    width = weights.up.outputs // (2 if weights.gated else 1)
    act = torch.empty(len(hidden), width, device=hidden.device)
    if impl == "cpp":
        residual = torch.empty_like(hidden)
        build.in_use(weights.up.weight_type).labkit_mlp_gemm(
            byref(weights.c),
            pointer(hidden),
            pointer(addend),
            pointer(addend_bias),
            residual_from_norm,
            len(hidden),
            pointer(act),
            pointer(residual),
            threads,
        )
        return act, residual
    gpu.require()
    from .triton_impl import mlp_gemm as run

    changed = torch.empty_like(hidden) if addend is not None or residual_from_norm else None
    launch = gpu.default_launcher()
    run(hidden, addend, addend_bias, weights, act, changed, launch, residual_from_norm=residual_from_norm)
    return act, hidden if changed is None else changed


@checked(weights=mlp_weights, hidden=floats("rows", "width"), down=mlp_down)
def mlp(hidden: Tensor, weights: MlpWeights, down: Linear, *, threads: int = 1, impl: str) -> Tensor:
    """hidden [N, H] float32 -> act down^T + bias [N, outputs], with act as in `mlp_gemm`: a whole MLP in one call.

    impl: "cpp" or "reference".
    """
    if impl == "reference":
        return whole_reference(hidden, weights, down)
    if impl != "cpp":
        raise UserError(f"got impl = {impl!r}, expected 'cpp' or 'reference'; on a GPU call mlp_gemm and gemm")
    out = torch.empty(len(hidden), down.outputs)
    build.in_use(weights.up.weight_type).labkit_mlp(
        byref(weights.c), byref(down.c), pointer(hidden), len(hidden), pointer(out), threads
    )
    return out
