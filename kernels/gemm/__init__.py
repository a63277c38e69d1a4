"""Small-batch GEMM on packed weights: attention output, second MLP matrix, LM head."""

from ctypes import byref
from dataclasses import replace
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional as F

from labkit.system.errors import UserError

from .. import build, gpu
from ..build import INT, LONG, POINTER
from ..checks import check_rows
from ..dispatch import choose
from ..types import Linear, pointer
from .reference import gemm as reference

BLOCK = 32  # outputs per packed block, kBlock of tile.h
LANES = {torch.bfloat16: 2, torch.int8: 4}  # inputs that lie side by side in a packed block, kLanesPerK of tile.h
QUANTIZED_AT_ONCE = 1024  # rows: what quantising costs beyond its result
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
    "unpack_words",
]

build.declare("labkit_gemm", POINTER, POINTER, LONG, POINTER, INT)


def gemm(x: Tensor, linear: Linear, *, threads: int = 1, impl: str) -> Tensor:
    """x [rows, inputs] float32 -> x W^T + b [rows, outputs] float32, summed in float32.

    Reads every weight once for up to 12 rows (AVX-512): bytes = outputs * inputs * element size.
    """
    check_rows("x", x, linear.inputs)
    return choose("gemm", impl, threads, reference=reference, cpp=_cpp, triton=_triton)(x, linear, threads)


def _cpp(x: Tensor, linear: Linear, threads: int) -> Tensor:
    out = torch.empty(x.shape[0], linear.outputs)
    library = build.in_use(linear.weight_type)
    library.labkit_gemm(byref(linear.c), pointer(x), x.shape[0], pointer(out), threads)
    return out


def _triton(x: Tensor, linear: Linear, threads: int) -> Tensor:
    gpu.require()
    from .triton_impl import gemm as run

    out = torch.empty(x.shape[0], linear.outputs, device=x.device)
    return run(x, linear, out, gpu.default_launcher())


def packed_shape(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of a packed [outputs, inputs] matrix: [blocks, K, 32], or with L inputs side by side, K padded to whole L,
    [blocks, K / L, 32, L]: L is 2 for bf16 and 4 for int8.
    """
    blocks, lanes = -(-outputs // BLOCK), LANES.get(dtype, 1)
    return (blocks, inputs, BLOCK) if lanes == 1 else (blocks, -(-inputs // lanes), BLOCK, lanes)


def pack(weight: Tensor, out: Tensor | None = None) -> Tensor:
    """[outputs, inputs] -> the packed layout of panels.h, same dtype, zero-padded; written into `out` if given."""
    outputs, inputs = weight.shape
    shape = packed_shape(outputs, inputs, weight.dtype)
    if out is None:
        out = torch.empty(shape, dtype=weight.dtype)
    lanes = LANES.get(weight.dtype, 1)
    depth = shape[1] * lanes
    whole = outputs // BLOCK
    for packed, rows in ((out[:whole], weight[: whole * BLOCK]), (out[whole:], weight[whole * BLOCK :])):
        if len(packed) == 0:
            continue
        missing = len(packed) * BLOCK - len(rows)
        if missing or inputs != depth:
            rows = F.pad(rows, (0, depth - inputs, 0, missing))
        by_block = rows.unflatten(0, (-1, BLOCK))
        if lanes > 1:
            packed.copy_(by_block.unflatten(2, (-1, lanes)).permute(0, 2, 1, 3))
        else:
            packed.copy_(by_block.permute(0, 2, 1))
    return out


def unpack(panels: Tensor) -> Tensor:
    """What `pack` made, or `pack_scales` -> [blocks * 32, K], padding included."""
    if panels.dim() == 4:
        panels = panels.transpose(2, 3).flatten(1, 2)
    return panels.transpose(1, 2).flatten(0, 1)


def group_size(inputs: int, groups: int) -> int:
    """Inputs that share a scale when a row is cut into `groups`: whole fours, so that the last may be smaller, or
    missing.
    """
    return -(-inputs // (groups * LANES[torch.int8])) * LANES[torch.int8]


def quantize(weight: Tensor, groups: int = 1) -> tuple[Tensor, Tensor]:
    """[outputs, inputs] -> int8 of that shape and scales float32 [outputs, groups], symmetric: weight = int8 * scale.

    `group_size` inputs of a row share a scale: their largest magnitude / 127. The error of a weight is at most half of
    it.
    """
    outputs, inputs = weight.shape
    size = group_size(inputs, groups)
    ints = torch.empty(outputs, inputs, dtype=torch.int8, device=weight.device)
    scales = torch.empty(outputs, -(-inputs // size), device=weight.device)
    for begin in range(0, outputs, QUANTIZED_AT_ONCE):
        rows = slice(begin, begin + QUANTIZED_AT_ONCE)
        grouped = F.pad(weight[rows].float(), (0, -inputs % size)).unflatten(1, (-1, size))
        torch.amax(grouped.abs(), dim=2, out=scales[rows]).div_(127)
        steps = grouped / torch.where(scales[rows] > 0, scales[rows], 1.0)[:, :, None]
        ints[rows] = steps.round_().flatten(1)[:, :inputs]
    return ints, scales


def cut_groups(begin: int, end: int, group: int, groups: int) -> tuple[list[int], int]:
    """Inputs [begin, end) of rows whose `groups` scales each belong to `group` inputs: (where the groups of the part
    begin in the whole row, their size).

    A part that begins within a group gets groups as small as it takes for each to have one scale. Raises ValueError
    where they would cut a lane of the kernels.
    """
    if groups == 1:
        return [begin], group_size(end - begin, 1)
    size = gcd(group, begin)
    if size % LANES[torch.int8]:
        raise UserError(
            f"groups of {group} inputs cannot be cut at input {begin}; use q_groups=1, or a tp_size that cuts elsewhere"
        )
    return list(range(begin, end, size)), size


def pack_scales(scales: Tensor) -> Tensor:
    """[outputs, groups] -> [blocks, groups, 32], zero-padded."""
    padded = F.pad(scales, (0, 0, 0, -len(scales) % BLOCK))
    return padded.unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()


def pack_words(ints: Tensor) -> Tensor:
    """int8 [outputs, inputs] -> [outputs, ceil(inputs / 4), 4]: words of four, one from each quarter of a row."""
    words = F.pad(ints, (0, -ints.shape[1] % 4)).unflatten(1, (4, -1)).transpose(1, 2)
    return words.clone(memory_format=torch.contiguous_format)


def unpack_words(words: Tensor, inputs: int) -> Tensor:
    """The int8 [outputs, inputs] that `pack_words` was given."""
    return words.transpose(1, 2).flatten(1)[:, :inputs]


def packed(linear: Linear, impl: str = "cpp") -> Linear:
    """The same matrix of layout "rows" as the kernels of `impl` read it."""
    if impl == "reference":
        return linear
    if impl == "triton":
        if linear.scales is None:
            return linear
        return replace(linear, weight=pack_words(linear.weight), layout="words")
    bias = None if linear.bias is None else F.pad(linear.bias, (0, -linear.outputs % BLOCK))
    scales = None if linear.scales is None else pack_scales(linear.scales)
    return replace(linear, weight=pack(linear.weight), bias=bias, scales=scales, layout="panels")


def interleave_gate(gate_up: Tensor) -> Tensor:
    """[2 I, ...] gate rows then up rows -> half blocks of 16 gate and 16 up rows in turn, I zero-padded to 16."""
    half = BLOCK // 2
    gate, up = gate_up.chunk(2)
    missing = -len(gate) % half
    if missing:
        gate, up = (F.pad(part, (0, 0) * (part.dim() - 1) + (0, missing)) for part in (gate, up))
    return torch.stack((gate.unflatten(0, (-1, half)), up.unflatten(0, (-1, half))), dim=1).flatten(0, 2)


def unpack_rows(linear: Linear, rows: Tensor) -> Tensor:
    """Rows of a matrix in any layout, [len(rows), inputs] float32: the embedding lookup in a tied LM head."""
    if linear.layout != "panels":
        scales = None if linear.scales is None else linear.scales[rows]
        return replace(linear, weight=linear.weight[rows], scales=scales).floats()
    block, lane = rows // BLOCK, rows % BLOCK
    taken = linear.weight[block, :, lane].reshape(len(rows), -1)[:, : linear.inputs]
    return linear.scaled(taken, None if linear.scales is None else linear.scales[block, :, lane])
