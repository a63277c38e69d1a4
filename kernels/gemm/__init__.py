"""Small-batch GEMM on packed weights: attention output, second MLP matrix, LM head."""

from ctypes import byref, c_int32, c_int64

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import build
from ..dispatch import choose
from ..types import Linear, check_rows, ptr
from .reference import gemm as reference

BLOCK = 32  # outputs per packed block, kBlock of panels.h
__all__ = ["gemm", "pack", "unpack_rows"]


def gemm(x: Tensor, linear: Linear, *, threads: int = 1, impl: str) -> Tensor:
    """x [rows, inputs] float32 -> x W^T + b [rows, outputs] float32, summed in float32.

    Reads every weight once for up to 12 rows (AVX-512): bytes = outputs * inputs * element size.
    """
    check_rows("x", x, linear.inputs)
    return choose("gemm", impl, reference=reference, cpp=_cpp)(x, linear, threads)


def _cpp(x: Tensor, linear: Linear, threads: int) -> Tensor:
    out = torch.empty(x.shape[0], linear.outputs)
    library = build.in_use(linear.weight_type)
    library.labkit_gemm(byref(linear.c), ptr(x), c_int64(x.shape[0]), ptr(out), c_int32(threads))
    return out


def packed_shape(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of a packed [outputs, inputs] matrix: [blocks, K, 32], bf16 [blocks, K / 2, 32, 2]."""
    blocks = -(-outputs // BLOCK)
    return (blocks, -(-inputs // 2), BLOCK, 2) if dtype == torch.bfloat16 else (blocks, inputs, BLOCK)


def pack(weight: Tensor, out: Tensor | None = None) -> Tensor:
    """[outputs, inputs] -> the packed layout of panels.h, same dtype, zero-padded; written into `out` if given."""
    outputs, inputs = weight.shape
    shape = packed_shape(outputs, inputs, weight.dtype)
    if out is None:
        out = torch.empty(shape, dtype=weight.dtype)
    depth = shape[1] * (2 if len(shape) == 4 else 1)
    whole = outputs // BLOCK
    for packed, rows in ((out[:whole], weight[: whole * BLOCK]), (out[whole:], weight[whole * BLOCK :])):
        if len(packed) == 0:
            continue
        missing = len(packed) * BLOCK - len(rows)
        if missing or inputs != depth:
            rows = F.pad(rows, (0, depth - inputs, 0, missing))
        by_block = rows.unflatten(0, (-1, BLOCK))
        if len(shape) == 4:
            packed.copy_(by_block.unflatten(2, (-1, 2)).permute(0, 2, 1, 3))
        else:
            packed.copy_(by_block.permute(0, 2, 1))
    return out


def interleave_gate(gate_up: Tensor) -> Tensor:
    """[2 I, ...] gate rows then up rows -> half blocks of 16 gate and 16 up rows in turn, I zero-padded to 16."""
    half = BLOCK // 2
    gate, up = gate_up.chunk(2)
    missing = -len(gate) % half
    if missing:
        gate, up = (F.pad(part, (0, 0) * (part.dim() - 1) + (0, missing)) for part in (gate, up))
    return torch.stack((gate.unflatten(0, (-1, half)), up.unflatten(0, (-1, half))), dim=1).flatten(0, 2)


def unpack_rows(packed: Tensor, rows: Tensor, inputs: int) -> Tensor:
    """Rows of the original matrix, [len(rows), inputs] float32: the embedding lookup in a tied, packed LM head."""
    block, lane = rows // BLOCK, rows % BLOCK
    taken = packed[block, :, lane]
    return taken.reshape(len(rows), -1)[:, :inputs].float()
