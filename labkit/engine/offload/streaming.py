"""Weights with resident layers and layers that are streamed from a file.

Each rank's file has its 1/N of every layer, and a rank reads only its own file. The ranks exchange sums of activations,
which are far smaller than the weights that each rank would otherwise gather from the others.
"""

from __future__ import annotations

import torch

from labkit.engine.offload.options import Offload
from labkit.engine.offload.room import WeightSizes, residents, room_for_weights
from labkit.kernels import ModelWeights, build
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.layer_stream import Block, LayerStream
from labkit.kernels.layer_stream.device import DeviceStream
from labkit.kernels.memory import Arena, Heap
from labkit.kernels.slot_stream.queues import Queues
from labkit.system.collective import Gather, own_result
from labkit.weights.build import build_layers
from labkit.weights.capacity import layers_bytes, outside_bytes, vector_bytes
from labkit.weights.checkpoint.saved import SavedWeights, StreamedWeights
from labkit.weights.records import Builder
from labkit.weights.spec import WeightSpec


def opened(
    spec: WeightSpec, saved: SavedWeights, offload: Offload, gather: Gather, device: torch.device, queues: Queues
) -> tuple[ModelWeights, StreamedLayers | None]:
    """Returns the weights and the stream of the offloaded layers; the stream is None if all layers fit into the memory
    of `device`. For a GPU, layers are read into slots of the host and copied on; the host has as many slots as the GPU.

    All ranks call it together. Raises UserError on all ranks if one of them has too little memory.
    """
    part = spec.part
    file = saved.manifest.files[part.rank]
    first = part.layers.start
    room = min(gather(own_result(lambda: room_for_weights(offload, part.size, device), gather)))
    sizes = WeightSizes.of_file(max(saved.manifest.files, key=lambda file: file.bytes))
    resident = residents(sizes, room, offload.slots)
    blocks = [
        Block(layer.layer - first, layer.offset, layer.bytes, int(layer.digest, 16))
        for layer in file.layers
        if layer.layer not in resident
    ]
    streamed, slots = None, {}
    if blocks:
        library = build.load(str(spec.dtype).removeprefix("torch."))
        reader = LayerStream(library, saved.folder / file.name, blocks, offload.slots)
        stream: LayerStream | DeviceStream = reader
        if spec.impl == "triton":
            stream = own_result(lambda: _copied_on(reader, offload.slots, device, queues), gather)
        missing = sum(block.bytes for block in blocks) - offload.slots * stream.slot_bytes
        numbers = {block.layer: number for number, block in enumerate(blocks)}
        places = tuple(numbers.get(layer, -1) for layer in range(len(part.layers)))
        streamed = StreamedLayers(stream, places, file.bytes - missing)
        slots = {block.layer + first: (stream.memory(0), block.offset) for block in blocks}
    place: Arena | Heap = Heap(device)
    if spec.impl == "cpp":  # the system refuses more address space than memory: reserve only the resident bytes
        resident_bytes = layers_bytes(spec, resident) + len(blocks) * vector_bytes(part)
        place = Arena.reserved(outside_bytes(spec) + resident_bytes)
    with torch.inference_mode():
        weights = build_layers(StreamedWeights(saved, part, slots), Builder(spec, place))
    return weights, streamed


def _copied_on(reader: LayerStream, slots: int, device: torch.device, queues: Queues) -> DeviceStream:
    stream = DeviceStream(reader, slots, device, queues)
    stream.pin(reader.all_slots)
    return stream
