"""Small-batch GEMM on packed weights: attention output, second MLP matrix, LM head."""

import ctypes
from ctypes import byref
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from labkit.system.rounding import round_up

from .. import build, gpu
from ..build import INT, LONG, POINTER, fields
from ..checks import checked, floats, unchecked
from ..checks import linear as linear_fits
from ..codes import (
    BLOCK,
    LANES,
    PACKED,
    cut_groups,
    group_size,
    pack_scales,
    packed_shape,
    quantize,
    unpack_nibbles,
    unpack_scales,
    unpack_words,
)
from ..codes import pack_words as words_of_codes
from ..types import Linear, pointer
from . import layout_checks
from .reference import gemm as reference

__all__ = [
    "cut_groups",
    "gemm",
    "group_size",
    "pack",
    "pack_scales",
    "pack_words",
    "packed",
    "packed_shape",
    "quantize",
    "unpack",
    "unpack_rows",
    "unpack_scales",
    "unpack_words",
]

build.declare("labkit_gemm", POINTER, POINTER, LONG, POINTER, INT, allocates=True)
build.declare("labkit_pack", POINTER, POINTER, INT, INT)


@build.mirrors("PackedFrom")
class CPackedFrom(ctypes.Structure):
    """A matrix that `labkit_pack` reads, see packing.cpp."""

    _fields_ = fields((POINTER, "first second"), (LONG, "outputs inputs row_stride column_stride"), (INT, "size lanes"))


@checked(linear=linear_fits, x=floats("rows", "width"))
def gemm(x: Tensor, linear: Linear, *, threads: int = 1, impl: str) -> Tensor:
    """x [rows, inputs] float32 -> x W^T + b [rows, outputs] float32, summed in float32.

    Reads every weight once for up to 12 rows (AVX-512): bytes = outputs * inputs * element size.
    """
    if impl == "reference":
        return reference(x, linear)
    out = torch.empty(x.shape[0], linear.outputs, device=x.device)
    if impl == "cpp":
        build.in_use(linear.weight_type).labkit_gemm(byref(linear.c), pointer(x), x.shape[0], pointer(out), threads)
        return out
    gpu.require()
    from .triton_impl import gemm as run

    return run(x, linear, out, gpu.default_launcher())


pack_words = checked(bits=layout_checks.bits, codes=layout_checks.codes)(words_of_codes)


@checked(
    bits=layout_checks.bits, weight=layout_checks.matrix, second=layout_checks.same_matrix, out=layout_checks.panels
)
def pack(weight: Tensor, second: Tensor | None = None, *, out: Tensor | None = None, bits: int = 8) -> Tensor:
    """[outputs, inputs] -> the packed layout of panels.h, zero-padded, in the same dtype; 4-bit codes as uint8. Writes
    into `out` if given.

    second: a matrix of the same shape. Its rows alternate with the rows of `weight`: each block has 16 rows of both, as
    the kernels of a gated MLP read gate and up rows.
    """
    outputs, inputs = weight.shape
    dtype = PACKED[4] if bits == 4 else weight.dtype
    if second is not None:
        outputs = 2 * round_up(outputs, BLOCK // 2)
        if second.stride() != weight.stride():
            weight, second = weight.contiguous(), second.contiguous()
    if out is None:
        out = torch.empty(packed_shape(outputs, inputs, dtype), dtype=dtype)
    source = CPackedFrom(
        first=weight.data_ptr(),
        second=None if second is None else second.data_ptr(),
        outputs=len(weight),
        inputs=inputs,
        row_stride=weight.stride(0),
        column_stride=weight.stride(1),
        size=weight.element_size(),
        lanes=LANES.get(weight.dtype, 1),
    )
    build.any_library().labkit_pack(byref(source), pointer(out), bits == 4, torch.get_num_threads())
    return out


def unpack(panels: Tensor) -> Tensor:
    """The inverse of `pack`: [blocks * 32, K], padding included."""
    if panels.dtype == PACKED[4]:
        return unpack_nibbles(panels)
    if panels.dim() == 4:
        panels = panels.transpose(2, 3).flatten(1, 2)
    return panels.transpose(1, 2).flatten(0, 1)


@checked(linear=layout_checks.linear_of_rows)
def packed(linear: Linear, impl: str = "cpp") -> Linear:
    """A matrix of layout "rows" in the layout that the kernels of `impl` read."""
    if impl == "reference":
        return linear
    if impl == "triton":
        if linear.scales is None:
            return linear
        return replace(linear, weight=words_of_codes(linear.weight, linear.bits), layout="words")
    bias = None if linear.bias is None else F.pad(linear.bias, (0, -linear.outputs % BLOCK))
    scales = None if linear.scales is None else pack_scales(linear.scales)
    weight = unchecked(pack)(linear.weight, bits=linear.bits)
    return replace(linear, weight=weight, bias=bias, scales=scales, layout="panels")


def interleave_gate(gate_up: Tensor) -> Tensor:
    """[2 I, ...] gate rows then up rows -> half blocks of 16 gate and 16 up rows in turn, I zero-padded to 16."""
    half = BLOCK // 2
    gate, up = gate_up.chunk(2)
    missing = -len(gate) % half
    if missing:
        gate, up = (F.pad(part, (0, 0) * (part.dim() - 1) + (0, missing)) for part in (gate, up))
    return torch.stack((gate.unflatten(0, (-1, half)), up.unflatten(0, (-1, half))), dim=1).flatten(0, 2)


@checked(linear=layout_checks.linear_of_any_layout, rows=layout_checks.rows_of_linear)
def unpack_rows(linear: Linear, rows: Tensor) -> Tensor:
    """Rows of a matrix in any layout, [len(rows), inputs] float32: the embedding lookup in a tied LM head."""
    if linear.layout != "panels":
        stored, scales = linear.weight[rows], None if linear.scales is None else linear.scales[rows]
        if linear.layout == "words":
            stored = unpack_words(stored, linear.inputs, linear.bits)
        return linear.scaled(stored, scales)
    block, lane = rows // BLOCK, rows % BLOCK
    if linear.weight.dtype == PACKED[4]:
        spans = linear.weight[block, :, :, lane]  # [rows, spans, 8, 4]
        taken = (torch.stack((spans & 15, spans >> 4), dim=2).view(torch.int8) - 8).flatten(1)
    else:
        taken = linear.weight[block, :, lane].reshape(len(rows), -1)
    scales = None if linear.scales is None else linear.scales[block, :, :, lane]
    return linear.scaled(taken[:, : linear.inputs], scales)
