"""How much memory the packed weights of a model take: what an arena, or a slot for one layer, has to hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import gcd

import torch

from labkit.kernels.gemm import group_size, packed_shape
from labkit.kernels.memory import aligned
from labkit.kernels.types import float_dtype
from labkit.models.shards import SUMMED, Shard
from labkit.weights.quantise import Quantization

PADDING = 32  # rows of a block: matrices, scales and biases are padded to whole ones


def model_bytes(part: Shard, dtype: torch.dtype, quant: Quantization) -> int:
    """Bytes of everything that a rank holds, packed for the C++ kernels; a tied head is packed once."""
    return outside_bytes(part, dtype, quant) + len(part.layers) * layer_bytes(part, dtype, quant)


def layer_bytes(part: Shard, dtype: torch.dtype, quant: Quantization) -> int:
    """Bytes of one layer: its packed matrices, their scales, and its vectors in float32."""
    local = replace(part, sums_whole=False)
    shapes = local.layer_shapes
    total = _bytes(shapes.values(), dtype, quant) + _vector(len(part.query))  # the slopes of ALiBi
    if not part.config.pre_norm:
        total += 2 * _vector(part.config.hidden_size)  # the norm that the next layer's input goes through
    if dtype == torch.int8 and part.size > 1 and quant.groups > 1:  # groups that a cut makes smaller
        total += sum(_scales_of_cut(local, name, shapes, quant) for name in SUMMED)
    return total


def outside_bytes(part: Shard, dtype: torch.dtype, quant: Quantization) -> int:
    """Bytes of what is outside the layers."""
    outside = dict(replace(part, sums_whole=False).top_shapes)
    positions = outside.pop("positions.weight", (0, 0))
    stored = dtype if quant.lm_head else float_dtype(dtype)
    return _vector(positions[0] * positions[1]) + _bytes(outside.values(), stored, quant)


def _bytes(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype, quant: Quantization) -> int:
    total = 0
    for shape in shapes:
        if len(shape) == 1:
            total += _vector(shape[0])
        else:
            rows = shape[0] + PADDING
            total += aligned(torch.Size(packed_shape(rows, shape[1], dtype)).numel() * dtype.itemsize)
            total += _vector(rows * quant.groups) + _vector(rows)
    return total


def _vector(count: int) -> int:
    return aligned(4 * (count + PADDING))


def _scales_of_cut(local: Shard, name: str, shapes: Mapping[str, tuple[int, ...]], quant: Quantization) -> int:
    cut, (outputs, inputs) = local.cut(name), shapes[name]
    assert cut is not None
    size = gcd(group_size(cut.whole, quant.groups), cut.ranges[0][0])
    return _vector((outputs + PADDING) * (inputs // size + 1))
