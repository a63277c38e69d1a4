"""The product in Triton, in one kernel with optional norm, bias, second product and residual.

More than 16 rows go through torch's GEMM: they are bound by arithmetic, where it is the fastest.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import FEW_ROWS, Launcher, dot_type, optional, padded_rows
from ..plain import normalise
from ..plain import soft_capped as soft_capped_rows
from ..residual_add.triton_impl import add_rows
from ..tiles import product, soft_capped
from ..tuned import Tile
from ..types import NO_NORM, Linear, Norm


@triton.jit
def _gemm(
    out_ptr, residual_ptr, M, N, eps, gain_ptr, shift_ptr,
    x_ptr, w_ptr, scales_ptr, bias_ptr, x2_ptr, w2_ptr, scales2_ptr, bias2_ptr,
    NORM: tl.constexpr, SHIFT: tl.constexpr, K: tl.constexpr, CODES: tl.constexpr, BIAS: tl.constexpr,
    K2: tl.constexpr, CODES2: tl.constexpr, BIAS2: tl.constexpr, RESIDUAL: tl.constexpr, CAP: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, MP: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = norm(x) W^T + bias (+ x2 W2^T + bias2) (+ residual) [M, N], under the cap.

    Two products in one kernel serve a parallel residual, to which attention output and second MLP matrix are both
    added: that saves a launch and writing the sum in between. The wait of the first product serves both.
    """
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = rows < N
    y = product(
        w_ptr, scales_ptr, rows, inside, x_ptr, x_ptr, x_ptr, gain_ptr, shift_ptr, eps, x_ptr, M,
        K, CODES, NORM, SHIFT, False, False, "none", BN, BK, AHEAD, MP, DOT, PDL,
    )  # fmt: skip
    if K2 != 0:
        y += product(
            w2_ptr, scales2_ptr, rows, inside, x2_ptr, x2_ptr, x2_ptr, gain_ptr, shift_ptr, eps, x2_ptr, M,
            K2, CODES2, "none", False, False, False, "none", BN, BK, AHEAD, MP, DOT, False,
        )  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + rows, mask=inside, other=0.0)[:, None]
    if BIAS2:
        y += tl.load(bias2_ptr + rows, mask=inside, other=0.0)[:, None]
    m = tl.arange(0, MP)
    mask = inside[:, None] & (m < M)[None, :]
    at = m[None, :] * N + rows[:, None]
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=mask, other=0.0)
    if CAP != 0.0:
        y = soft_capped(y, CAP)
    tl.store(out_ptr + at, y, mask=mask)


def gemm(
    x: Tensor,
    weights: Linear,
    out: Tensor,
    launch: Launcher,
    *,
    bias: Tensor | None = None,
    norm: Norm = NO_NORM,
    also: tuple[Tensor, Linear, Tensor | None] | None = None,
    residual: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """out [M, N] = norm(x) W^T + bias + residual. `also`: (x2, W2, bias2); its product is added in the same kernel.

    `bias` replaces the bias of `weights`. cap: a sum y becomes cap * tanh(y / cap). `residual` is float32, the other
    tensors are of any floating type.
    """
    bias = weights.bias if bias is None else bias
    x2, weights2, bias2 = also or (None, None, None)
    rows = len(x)
    if rows > FEW_ROWS:
        wide = [matmul(normalise(norm, x), weights)]
        if x2 is not None and weights2 is not None:
            wide.append(matmul(x2, weights2))
        add_rows([*wide, residual], [bias, bias2], out, launch)
        return out if cap is None else out.copy_(soft_capped_rows(out, cap))
    op = "gemm" if weights2 is None else "two_gemms"
    tile = launch.tile(op, tile_type(weights), rows, weights.outputs, weights.inputs)
    launch(
        _gemm,
        (triton.cdiv(weights.outputs, tile.rows),),
        tile,
        out_ptr=out,
        residual_ptr=optional(residual, out),
        N=weights.outputs,
        **product_arguments(x, norm, weights, bias),
        **tile_arguments(rows, weights, tile),
        x2_ptr=optional(x2, out),
        w2_ptr=weights2.on_gpu if weights2 else out,
        scales2_ptr=optional(weights2.scales if weights2 else None, out),
        bias2_ptr=optional(bias2, out),
        K2=weights2.inputs if weights2 else 0,
        CODES2=codes(weights2) if weights2 else (0, 0, 0),
        BIAS2=bias2 is not None,
        RESIDUAL=residual is not None,
        CAP=cap or 0.0,
    )
    return out


def product_arguments(x: Tensor, norm: Norm, weights: Linear, bias: Tensor | None) -> dict[str, object]:
    """What each kernel with a product norm(x) W^T + bias takes for it, except for the tile."""
    return {
        "eps": norm.eps,
        "x_ptr": x,
        "gain_ptr": optional(norm.weight, x),
        "shift_ptr": optional(norm.bias, x),
        "w_ptr": weights.on_gpu,
        "scales_ptr": optional(weights.scales, x),
        "bias_ptr": optional(bias, x),
        "NORM": norm.kind,
        "SHIFT": norm.bias is not None,
        "K": weights.inputs,
        "CODES": codes(weights),
        "BIAS": bias is not None,
    }


def tile_arguments(rows: int, weights: Linear, tile: Tile) -> dict[str, object]:
    """What each kernel with a product takes for its tile of the weight and its rows of activations."""
    return {
        "M": rows,
        "BN": tile.rows,
        "BK": tile.depth,
        "AHEAD": min(tile.stages, 2),
        "MP": padded_rows(rows),
        "DOT": dot_type(weights.weight.dtype),
    }


def codes(weights: Linear) -> tuple[int, int, int]:
    """(bits of a code, inputs that share a scale, 1 for a scale or 2 with a minimum); zeros for a floating weight."""
    if weights.scales is None:
        return (0, 0, 0)
    return (weights.bits, min(weights.group, weights.inputs), weights.scales.shape[2])


def tile_type(weights: Linear) -> str:
    """The key of tuned tiles: a floating type, int8 or int4 for a scale per row, or int8-32 and the like for groups."""
    if weights.scales is None:
        return weights.weight_type
    return f"int{weights.bits}" + (f"-{weights.group}" if weights.group < weights.inputs else "")


def matmul(x: Tensor, weights: Linear) -> Tensor:
    """x W^T by torch, in the type of the weight (int8: bfloat16). Many rows keep its GEMM busy."""
    if weights.scales is None:
        return x.to(weights.weight.dtype) @ weights.weight.T
    return x.to(torch.bfloat16) @ weights.floats(torch.bfloat16).T
