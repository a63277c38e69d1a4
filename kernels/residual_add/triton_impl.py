"""Sums of rows in one Triton kernel: up to three matrices and two biases, or two matrices, the second normed."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..gpu import Launcher, optional
from ..tiles import normed_row, wait_for_previous
from ..tuned import Tile
from ..types import Norm

TILE = Tile(rows=1, depth=1024)


@triton.jit
def _add_rows(
    out_ptr, a_ptr, b_ptr, c_ptr, bias_ptr, bias2_ptr, H,
    B: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr, BIAS2: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    at = tl.program_id(0).to(tl.int64) * H + column
    total = tl.load(a_ptr + at, mask=inside).to(tl.float32)
    if B:
        total += tl.load(b_ptr + at, mask=inside).to(tl.float32)
    if C:
        total += tl.load(c_ptr + at, mask=inside).to(tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + column, mask=inside)
    if BIAS2:
        total += tl.load(bias2_ptr + column, mask=inside)
    tl.store(out_ptr + at, total, mask=inside)


@triton.jit
def _add_normed(
    out_ptr, residual_ptr, x_ptr, bias_ptr, gain_ptr, shift_ptr, eps,
    H: tl.constexpr, NORM: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row per program."""
    wait_for_previous(PDL)
    k = tl.arange(0, BLOCK)
    inside = k < H
    at = tl.program_id(0).to(tl.int64) * H + k
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + k, mask=inside, other=0.0)
    x = normed_row(x, gain_ptr, shift_ptr, eps, k, H, NORM, SHIFT)
    tl.store(out_ptr + at, tl.load(residual_ptr + at, mask=inside, other=0.0) + x, mask=inside)


def add_normed(residual: Tensor, x: Tensor, bias: Tensor | None, norm: Norm, out: Tensor, launch: Launcher) -> Tensor:
    """out [M, H] = residual + norm(x + bias)."""
    rows, width = out.shape
    launch(
        _add_normed,
        (rows,),
        TILE,
        out_ptr=out,
        residual_ptr=residual,
        x_ptr=x,
        bias_ptr=optional(bias, out),
        gain_ptr=optional(norm.weight, out),
        shift_ptr=optional(norm.bias, out),
        eps=norm.eps,
        H=width,
        NORM=norm.kind,
        SHIFT=norm.bias is not None,
        BIAS=bias is not None,
        BLOCK=triton.next_power_of_2(width),
    )
    return out


def add_rows(parts: Sequence[Tensor | None], biases: Sequence[Tensor | None], out: Tensor, launch: Launcher) -> Tensor:
    """out [M, H] = the sum of one to three [M, H] and up to two [H]; None counts as zeros."""
    a, *others = [part for part in parts if part is not None]
    b, c = [*others, None, None][:2]
    bias, bias2 = [*(bias for bias in biases if bias is not None), None, None][:2]
    rows, width = out.shape
    launch(
        _add_rows,
        (rows, triton.cdiv(width, TILE.depth)),
        TILE,
        out_ptr=out,
        a_ptr=a,
        b_ptr=optional(b, out),
        c_ptr=optional(c, out),
        bias_ptr=optional(bias, out),
        bias2_ptr=optional(bias2, out),
        H=width,
        B=b is not None,
        C=c is not None,
        BIAS=bias is not None,
        BIAS2=bias2 is not None,
        BLOCK=TILE.depth,
    )
    return out
