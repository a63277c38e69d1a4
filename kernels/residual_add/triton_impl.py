"""Sums of up to three matrices of rows and two biases in one Triton kernel."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..gpu import Launcher, optional
from ..tiles import wait_for_previous
from ..tuned import Tile

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
