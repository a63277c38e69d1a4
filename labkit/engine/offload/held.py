"""Weights of which some layers stay on a GPU, and the others are in the host's memory and copied when their turn is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from platform import node

import psutil
import torch
from torch import Tensor

from labkit.engine.offload.options import Offload
from labkit.engine.offload.prepared import Wanted
from labkit.engine.offload.room import WeightSizes, made_by_all, residents, room_for_weights
from labkit.kernels import LayerWeights, ModelWeights
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.gpu import CPU
from labkit.kernels.layer_stream import PAGE
from labkit.kernels.layer_stream.device import DeviceStream, HeldBlocks
from labkit.kernels.memory import Arena, Heap, aligned
from labkit.kernels.slot_stream.queues import Queues
from labkit.kernels.types import Norm, float_dtype
from labkit.system.errors import UserError
from labkit.weights.build import CanonicalLayers, build_layers, canonical_layers, check_names, has_codes
from labkit.weights.canonical import Canonical
from labkit.weights.capacity import outside_bytes
from labkit.weights.checkpoint.save import Gather
from labkit.weights.records import Builder, matrices_of


def on_host(
    wanted: Wanted,
    offload: Offload,
    gather: Gather,
    device: torch.device,
    queues: Queues,
    done_with: Callable[[int], None] | None = None,
) -> tuple[ModelWeights, StreamedLayers | None]:
    """The weights, packed as they are read, and the stream that the layers come from which have no place on `device`;
    None where all of them fit. Nothing is written to a disk. `done_with(layer)` is called after each layer.

    Each rank holds its own part of every layer, and copies nothing else: what its kernels need of a layer, they have
    once that part is there. All ranks do so together. Raises UserError on all of them for less memory than the least
    that works for each, of the GPU or of the host.
    """
    check_names(wanted.policy, wanted.config, wanted.source, wanted.impl)
    part, canonical = canonical_layers(
        wanted.policy, wanted.source, wanted.dtype, wanted.impl, wanted.quant, wanted.part
    )
    builder = Builder(part, wanted.dtype, wanted.impl, wanted.quant, Heap(device))
    own = made_by_all(lambda: _sizes(wanted, builder, canonical), gather)
    room = min(gather(made_by_all(lambda: room_for_weights(offload, part.size, device), gather)))
    resident = residents(max(gather(own), key=lambda sizes: sizes.all), room, offload.slots)
    numbers = {layer: number for number, layer in enumerate(layer for layer in part.layers if layer not in resident)}
    streamed = None
    if numbers:
        blocks = [layer - part.layers.start for layer in numbers]
        needs = gather((node(), len(blocks) * own.largest))
        needed = sum(size for machine, size in needs if machine == node())
        if done_with is None:  # else the layers are freed where they come from
            made_by_all(lambda: _require_room(len(blocks), needed), gather)
        stream = DeviceStream(HeldBlocks(blocks, own.largest), offload.slots, device, queues)
        places = tuple(numbers.get(layer, -1) for layer in part.layers)
        streamed = StreamedLayers(stream, places, own.all - (len(numbers) - offload.slots) * own.largest)
        builder = SplitBuilder(
            part, wanted.dtype, wanted.impl, wanted.quant, Heap(device), stream=stream, numbers=numbers
        )
    with torch.inference_mode():
        weights = made_by_all(lambda: build_layers(wanted.config, canonical, builder, done_with=done_with), gather)
    return weights, streamed


@dataclass(frozen=True, kw_only=True)
class SplitBuilder(Builder):
    """Puts the matrices of some layers into blocks of the host's memory, which are pinned one after the other, and
    everything else on the device.

    numbers: of these layers' blocks. Their records show their matrices in the stream's first slot.
    """

    stream: DeviceStream
    numbers: Mapping[int, int]

    def layer(self, index: int, tensors: Canonical, norm_before: Norm) -> LayerWeights:
        if index not in self.numbers:
            return super().layer(index, tensors, norm_before)
        beside = Builder(self.part, self.dtype, self.impl, self.quant, MatricesOnHost(self.device), self.at_once)
        memory = self.stream.host.memory(self.numbers[index])
        block, slot = Arena(memory), Arena(self.stream.memory(0))

        def moved(tensor: Tensor) -> Tensor:
            block.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)
            return slot.empty(tuple(tensor.shape), tensor.dtype)

        layer = beside.layer(index, tensors, norm_before).with_matrices(moved)
        self.stream.pin(memory)
        return layer


class MatricesOnHost:
    """A layer's place whose matrices stay on the CPU; vectors, which are what it is asked for, are on `on`."""

    device = CPU

    def __init__(self, on: torch.device) -> None:
        self._on = on

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._on)


def _sizes(wanted: Wanted, builder: Builder, canonical: CanonicalLayers) -> WeightSizes:
    """Of this rank's part, by its first layer: all of them have the same shapes."""
    part, builder = builder.part, replace(builder, place=Heap(CPU))
    with torch.inference_mode():
        first = builder.layer(part.layers.start, canonical.layer(part.layers.start, builder.empty), Norm())
    tensors = [each for linear in matrices_of(first).values() for each in (linear.weight, linear.scales)]
    size = sum(aligned(tensor.nbytes) for tensor in tensors if tensor is not None)
    types = {wanted.dtype, float_dtype(wanted.dtype)} if has_codes(wanted.source) else {wanted.dtype}
    outside = max(outside_bytes(part, dtype, wanted.quant) for dtype in types)  # codes of a file are no larger
    return WeightSizes(outside, dict.fromkeys(part.layers, -(-size // PAGE) * PAGE))


def _require_room(layers: int, needed: int) -> None:
    """layers: of this rank. needed: bytes that all ranks on this machine take for theirs."""
    available = psutil.virtual_memory().available
    if needed > available:
        raise UserError(
            f"offload: the {layers} layers that don't stay on the GPU take {needed} bytes of the host's memory, which "
            f"has {available} available; use device='disk', or a larger resident_gb"
        )
