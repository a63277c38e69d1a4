"""Memory that the packed weights of a model take: the size of an arena, or of a slot for one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd

import torch

from labkit.kernels.codes import PACKED
from labkit.kernels.gemm import packed_shape
from labkit.kernels.memory import aligned
from labkit.kernels.types import float_dtype
from labkit.models.shards import SUMMED, Shard
from labkit.weights.quantise import Quantization, Scheme

PADDING = 32  # rows of a block: matrices, scales and biases are padded to whole blocks


def model_bytes(part: Shard, dtype: torch.dtype, quant: Quantization) -> int:
    """Bytes of a rank's part of the model, packed for the C++ kernels; a tied head is packed once."""
    return outside_bytes(part, dtype, quant) + len(part.layers) * layer_bytes(part, dtype, quant)


def layer_bytes(part: Shard, dtype: torch.dtype, quant: Quantization) -> int:
    """Bytes of one layer: its packed matrices, their scales, and its vectors in float32."""
    local = replace(part, sums_whole=False)
    total = _bytes(local, local.layer_shapes, dtype, quant) + _vector(len(part.query))  # the slopes of ALiBi
    if not part.config.pre_norm:
        total += 2 * _vector(part.config.hidden_size)  # the norm of the next layer's input
    return total


def vector_bytes(part: Shard) -> int:
    """Bytes of the vectors of one layer, biases included. They stay resident if the layer's matrices are offloaded."""
    local = replace(part, sums_whole=False)
    norm = 0 if part.config.pre_norm else 2 * _vector(part.config.hidden_size)
    vectors = sum(_vector(shape[0] + PADDING) for shape in local.layer_shapes.values())
    return vectors + _vector(len(part.query)) + norm


def outside_bytes(part: Shard, dtype: torch.dtype, quant: Quantization) -> int:
    """Bytes of the weights outside the layers."""
    local = replace(part, sums_whole=False)
    outside = dict(local.top_shapes)
    positions = outside.pop("positions.weight", (0, 0))
    return _vector(positions[0] * positions[1]) + _bytes(local, outside, dtype, quant)


def _bytes(local: Shard, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, quant: Quantization) -> int:
    total = 0
    for name, shape in shapes.items():
        if len(shape) == 1:
            total += _vector(shape[0])
            continue
        only_embedding = name == "embed.weight" and not local.config.tied_head
        scheme = quant.of(name) if dtype == torch.int8 and not only_embedding else None
        stored = PACKED[scheme.bits] if scheme else float_dtype(dtype)
        rows = shape[0] + PADDING
        total += aligned(torch.Size(packed_shape(rows, shape[1], stored)).numel() * stored.itemsize) + _vector(rows)
        if scheme:
            numbers = 2 if scheme.asymmetric else 1
            total += aligned(2 * rows * numbers * _groups(local, name, shape, scheme))
    return total


def _groups(local: Shard, name: str, shape: tuple[int, ...], scheme: Scheme) -> int:
    """Number of groups of a row. A cut between ranks can make groups smaller, and so there are more of them."""
    outputs, inputs = shape
    cut = local.cut(name) if name in SUMMED else None
    if cut is None:
        return -(-inputs // scheme.group(outputs, inputs))
    group = scheme.group(outputs, cut.whole)
    return 1 if group >= cut.whole else inputs // gcd(group, cut.ranges[0][0]) + 1


def _vector(count: int) -> int:
    return aligned(4 * (count + PADDING))
