"""Weights of which some layers stay in memory, and the others come from a file when their turn is."""

from __future__ import annotations

import math

import psutil
import torch

from labkit.engine.offload.options import Offload
from labkit.engine.offload.prepared import Wanted
from labkit.kernels import ModelWeights, build
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.layer_stream import Block, LayerStream
from labkit.kernels.memory import Arena
from labkit.system.errors import UserError
from labkit.weights.build import build_layers
from labkit.weights.capacity import model_bytes
from labkit.weights.checkpoint.manifest import FileRecord
from labkit.weights.checkpoint.save import Gather
from labkit.weights.checkpoint.saved import SavedWeights, Streaming
from labkit.weights.records import Builder

OF_AVAILABLE = 0.7  # of the memory that is available, for weights; the cache, the workspace and others have the rest


def opened(
    wanted: Wanted, saved: SavedWeights, offload: Offload, gather: Gather
) -> tuple[ModelWeights, StreamedLayers | None]:
    """The weights, and the stream that its missing layers come from; None where all of them fit into memory.

    All ranks open theirs together. Raises UserError on all of them for less memory than the least that works for each.
    """
    part = wanted.part
    file = saved.manifest.files[part.rank]
    first = part.layers.start
    room = min(gather(_room(offload, part.size)))
    resident = residents(max(saved.manifest.files, key=lambda each: each.bytes), room, offload.slots)
    blocks = [
        Block(each.layer - first, each.offset, each.bytes, int(each.digest, 16))
        for each in file.layers
        if each.layer not in resident
    ]
    streamed, slots = None, {}
    if blocks:
        library = build.load(str(wanted.dtype).removeprefix("torch."))
        stream = LayerStream(library, saved.folder / file.name, blocks, offload.slots)
        missing = sum(block.bytes for block in blocks) - offload.slots * stream.slot_bytes
        streamed = StreamedLayers(stream, _block_of(blocks, len(part.layers)), file.bytes - missing)
        slots = {block.layer + first: (stream.memory(0), block.offset) for block in blocks}
    place = Arena.reserved(model_bytes(part, wanted.dtype, wanted.quant))
    with torch.inference_mode():
        builder = Builder(part, wanted.dtype, "cpp", wanted.quant, place)
        weights = build_layers(wanted.config, Streaming(saved, part, slots), builder)
    return weights, streamed


def residents(file: FileRecord, room: float, slots: int) -> set[int]:
    """The layers that stay in memory: as many as `room` bytes hold, spread evenly among the others, so that those are
    read while these are computed.

    file: the largest of all ranks', so that all of them keep the same layers and wait for the same ones.
    """
    count = len(file.layers)
    if room >= file.bytes:
        return {each.layer for each in file.layers}
    if room < _least(file, slots):
        raise UserError(
            f"offload: got room for {room / 1e9:.3g} GB of weights; what is outside the layers takes "
            f"{_outside(file) / 1e9:.3g} GB and a slot {_largest(file) / 1e9:.3g} GB, so that the least is "
            f"resident_gb = {_rounded_up(_least(file, slots) / 1e9)} with {slots} slots"
        )
    stay = min(int((room - _least(file, slots)) // _largest(file)), max(0, count - slots - 1))
    return {each.layer for index, each in enumerate(file.layers) if (index + 1) * stay // count > index * stay // count}


def _room(offload: Offload, ranks: int) -> float:
    """Bytes that a rank may use for weights; where none are given, its share of what is available."""
    if offload.resident_gb is not None:
        return offload.resident_gb * 1e9
    return OF_AVAILABLE * psutil.virtual_memory().available / ranks


def _least(file: FileRecord, slots: int) -> int:
    """Bytes that a rank cannot do without: what is outside the layers, and the slots; of few layers all of them."""
    return min(_outside(file) + slots * _largest(file), file.bytes)


def _outside(file: FileRecord) -> int:
    return file.bytes - sum(each.bytes for each in file.layers)


def _largest(file: FileRecord) -> int:
    return max(each.bytes for each in file.layers)


def _rounded_up(gigabytes: float) -> float:
    """To four digits that count."""
    unit = 10.0 ** (math.floor(math.log10(gigabytes)) - 3)
    return float(f"{math.ceil(gigabytes / unit) * unit:.4g}")


def _block_of(blocks: list[Block], layers: int) -> tuple[int, ...]:
    numbers = {block.layer: number for number, block in enumerate(blocks)}
    return tuple(numbers.get(layer, -1) for layer in range(layers))
