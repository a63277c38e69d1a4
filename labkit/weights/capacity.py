"""Memory that the packed weights of a model take: the size of an arena, or of a slot for one layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import gcd

import torch

from labkit.kernels.codes import PACKED, SCALE_BYTES
from labkit.kernels.gemm import packed_shape
from labkit.kernels.memory import aligned
from labkit.kernels.types import float_dtype
from labkit.models.shards import SUMMED, Shard
from labkit.system.rounding import BLOCK
from labkit.weights.canonical import OF_EXPERTS
from labkit.weights.quantise import Scheme
from labkit.weights.spec import WeightSpec


def model_bytes(spec: WeightSpec) -> int:
    """Bytes of a rank's part of the model, packed for the C++ kernels; a tied head is packed once."""
    return outside_bytes(spec) + layers_bytes(spec)


def layers_bytes(spec: WeightSpec, layers: Iterable[int] | None = None, *, experts: bool = True) -> int:
    """Bytes of layers by their numbers in the model; None: of all layers of a rank's part. experts: with the experts of
    mixtures.
    """
    return sum(_bytes_of_layer(spec, layer, experts) for layer in (spec.part.layers if layers is None else layers))


def layer_bytes(spec: WeightSpec) -> int:
    """Bytes of the largest layer: its packed matrices, their scales, and its vectors in float32."""
    return max(_bytes_of_layer(spec, layer, True) for layer in spec.part.layers)


def _bytes_of_layer(spec: WeightSpec, layer: int, experts: bool) -> int:
    spec, part = _cut(spec), spec.part
    shapes = spec.part.shapes_of(layer)
    if part.config.experts and not experts:
        shapes = {name: shape for name, shape in shapes.items() if name not in OF_EXPERTS}
    total = _bytes(spec, shapes) + _vector(len(part.query))  # the slopes of ALiBi
    if not part.config.pre_norm:
        total += 2 * _vector(part.config.hidden_size)  # the norm of the next layer's input
    return total


def vector_bytes(part: Shard) -> int:
    """Bytes of the vectors of one layer, biases included. They stay resident if the layer's matrices are offloaded."""
    local = replace(part, sums_whole=False)
    norm = 0 if part.config.pre_norm else 2 * _vector(part.config.hidden_size)
    vectors = sum(_vector(shape[0] + BLOCK) for shape in local.layer_shapes.values())
    return vectors + _vector(len(part.query)) + norm


def outside_bytes(spec: WeightSpec) -> int:
    """Bytes of the weights outside the layers."""
    spec = _cut(spec)
    outside = dict(spec.part.top_shapes)
    positions = outside.pop("positions.weight", (0, 0))
    return _vector(positions[0] * positions[1]) + _bytes(spec, outside)


def _cut(spec: WeightSpec) -> WeightSpec:
    """The spec with the part as it is stored, after matrices in SUMMED are cut."""
    return replace(spec, part=replace(spec.part, sums_whole=False))


def _bytes(spec: WeightSpec, shapes: Mapping[str, tuple[int, ...]]) -> int:
    local, total = spec.part, 0
    for name, shape in shapes.items():
        experts = local.config.experts
        parts = len(local.experts) if experts and name.split(".")[0] in ("ff1", "ff2") else 1
        if len(shape) == 1:
            total += _vector(shape[0] + parts * BLOCK)
            continue
        only_embedding = name == "embed.weight" and not local.config.tied_head
        scheme = None if only_embedding else spec.scheme(name)
        stored = PACKED[scheme.bits] if scheme else float_dtype(spec.dtype)
        rows = shape[0] + parts * BLOCK
        total += aligned(torch.Size(packed_shape(rows, shape[1], stored)).numel() * stored.itemsize) + _vector(rows)
        if scheme:
            total += aligned(SCALE_BYTES * rows * scheme.numbers * _groups(local, name, shape, scheme))
    return total


def _groups(local: Shard, name: str, shape: tuple[int, ...], scheme: Scheme) -> int:
    """Number of groups of a row. A cut between ranks can make groups smaller, and so there are more of them."""
    outputs, inputs = shape
    cut = local.cut(name) if name in SUMMED else None
    if cut is None:
        return scheme.groups(outputs, inputs)
    group = scheme.group(outputs, cut.whole)
    return 1 if group >= cut.whole else inputs // gcd(group, cut.ranges[0][0]) + 1


def _vector(count: int) -> int:
    return aligned(4 * (count + BLOCK))
