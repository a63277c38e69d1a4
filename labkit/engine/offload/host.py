"""Weights with layers resident on a GPU, and layers in the host's memory that are copied when their turn comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from platform import node

import psutil
import torch
from torch import Tensor

from labkit.engine.offload.options import Offload
from labkit.engine.offload.room import WeightSizes, residents, room_for_weights
from labkit.kernels import LayerWeights, ModelWeights
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.gpu import CPU
from labkit.kernels.layer_stream import PAGE
from labkit.kernels.layer_stream.device import DeviceStream, HeldBlocks
from labkit.kernels.memory import Arena, Heap, aligned
from labkit.kernels.slot_stream.queues import Queues
from labkit.kernels.types import Norm
from labkit.system.collective import Gather, own_result
from labkit.system.errors import UserError
from labkit.system.rounding import round_up
from labkit.weights.build import CanonicalLayers, build_layers, canonical_layers, check_names, has_codes
from labkit.weights.canonical import Canonical
from labkit.weights.capacity import outside_bytes
from labkit.weights.protocol import TensorSource
from labkit.weights.records import Builder
from labkit.weights.spec import WeightSpec


def on_host(
    spec: WeightSpec,
    source: TensorSource,
    offload: Offload,
    gather: Gather,
    device: torch.device,
    queues: Queues,
    done_with: Callable[[int], None] | None = None,
) -> tuple[ModelWeights, StreamedLayers | None]:
    """Returns the weights, packed while they are read, and the stream of the layers that do not fit on `device`; the
    stream is None if all layers fit. Writes nothing to a disk. Calls `done_with(layer)` after each layer.

    Each rank holds and copies only its own part of every layer, which is all that its kernels need. All ranks call it
    together. Raises UserError on all ranks if one of them has too little memory, on its GPU or on the host.
    """
    check_names(spec, source)
    spec, canonical = canonical_layers(spec, source)
    part, builder = spec.part, Builder(spec, Heap(device))
    own = own_result(lambda: _sizes(spec, canonical, codes=has_codes(source)), gather)
    room = min(gather(own_result(lambda: room_for_weights(offload, part.size, device), gather)))
    resident = residents(max(gather(own), key=lambda sizes: sizes.all), room, offload.slots)
    numbers = {layer: number for number, layer in enumerate(layer for layer in part.layers if layer not in resident)}
    streamed = None
    if numbers:
        blocks = [layer - part.layers.start for layer in numbers]
        needs = gather((node(), len(blocks) * own.largest))
        needed = sum(size for machine, size in needs if machine == node())
        if done_with is None:  # with it, packing frees the source's layers one by one
            own_result(lambda: _require_room(len(blocks), needed), gather)
        stream = DeviceStream(HeldBlocks(blocks, own.largest), offload.slots, device, queues)
        places = tuple(numbers.get(layer, -1) for layer in part.layers)
        streamed = StreamedLayers(stream, places, own.all - (len(numbers) - offload.slots) * own.largest)
        builder = SplitBuilder(spec, Heap(device), stream=stream, numbers=numbers)
    with torch.inference_mode():
        weights = own_result(lambda: build_layers(canonical, builder, done_with=done_with), gather)
    return weights, streamed


@dataclass(frozen=True, kw_only=True)
class SplitBuilder(Builder):
    """Puts the matrices of offloaded layers into blocks of the host's memory, and everything else on the device. Blocks
    are pinned one after the other. The records of offloaded layers show their matrices in the stream's first slot.
    """

    stream: DeviceStream
    numbers: Mapping[int, int]  # offloaded layer to number of its block

    def layer(self, index: int, tensors: Canonical, norm_before: Norm) -> LayerWeights:
        if index not in self.numbers:
            return super().layer(index, tensors, norm_before)
        host_builder = Builder(self.spec, MatricesOnHost(self.device), self.at_once)
        memory = self.stream.host.memory(self.numbers[index])
        block, slot = Arena(memory), Arena(self.stream.memory(0))

        def moved(tensor: Tensor) -> Tensor:
            block.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)
            return slot.empty(tuple(tensor.shape), tensor.dtype)

        layer = host_builder.layer(index, tensors, norm_before).with_matrices(moved)
        self.stream.pin(memory)
        return layer


class MatricesOnHost:
    """Memory for a layer whose matrices stay on the CPU. Only vectors are allocated here, on device `on`."""

    device = CPU

    def __init__(self, on: torch.device) -> None:
        self._on = on

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._on)


def _sizes(spec: WeightSpec, canonical: CanonicalLayers, *, codes: bool) -> WeightSizes:
    """Returns the sizes of this rank's part, measured on its first layer: all layers have the same shapes. codes: the
    weights are the codes of a file.
    """
    part, builder = spec.part, Builder(spec, Heap(CPU))
    with torch.inference_mode():
        first = builder.layer(part.layers.start, canonical.layer(part.layers.start, builder.empty), Norm())
    tensors = [tensor for linear in first.matrices.values() for tensor in (linear.weight, linear.scales)]
    size = sum(aligned(tensor.nbytes) for tensor in tensors if tensor is not None)
    types = (spec, spec.unquantised) if codes else (spec,)  # a file's codes are no larger than floats
    outside = max(map(outside_bytes, types))
    return WeightSizes(outside, dict.fromkeys(part.layers, round_up(size, PAGE)))


def _require_room(layers: int, needed: int) -> None:
    """Raises UserError if the host has too little memory. layers: of this rank. needed: bytes for the offloaded layers
    of all ranks on this machine.
    """
    available = psutil.virtual_memory().available
    if needed > available:
        raise UserError(
            f"offload: the {layers} layers that don't stay on the GPU take {needed} bytes of the host's memory, which "
            f"has {available} available; use device='disk', or a larger resident_gb"
        )
