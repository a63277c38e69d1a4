"""Weights whose experts are read from a file by need. Everything else is resident, and so are the experts used most."""

from __future__ import annotations

import torch

from labkit.engine.offload.options import Offload
from labkit.engine.offload.room import WeightSizes, fewest_experts, room_for_weights, rounded_up
from labkit.kernels import ModelWeights, build
from labkit.kernels.expert_store import ExpertStore
from labkit.kernels.gpu import CPU
from labkit.kernels.memory import Arena, reserved
from labkit.system.collective import Gather, own_result
from labkit.system.errors import UserError
from labkit.weights.build import build_layers
from labkit.weights.canonical import OF_EXPERTS
from labkit.weights.capacity import layers_bytes, outside_bytes
from labkit.weights.checkpoint.manifest import FileRecord
from labkit.weights.checkpoint.saved import SavedWeights, StreamedWeights
from labkit.weights.checkpoint.stored_experts import StoredExperts, stored_experts
from labkit.weights.records import Builder
from labkit.weights.spec import WeightSpec


def with_experts_on_disk(
    spec: WeightSpec, saved: SavedWeights, offload: Offload, gather: Gather
) -> ModelWeights | None:
    """Returns the weights, with a store of the experts in memory for `offload`. None: the model has no experts, all of
    it fits into that memory, or not even everything besides the experts does.

    All ranks call it together.
    """
    part = spec.part
    if part.config.experts is None or spec.impl != "cpp" or not offload.experts:
        return None
    room = min(gather(own_result(lambda: room_for_weights(offload, part.size, CPU), gather)))
    file = saved.manifest.files[part.rank]
    stored = stored_experts(saved, part)
    if stored is None or room >= max(other.bytes for other in saved.manifest.files):
        return None
    library = build.load(str(spec.dtype).removeprefix("torch."))
    beside, slot_bytes = _sizes(spec, file, stored)
    least_slots = fewest_experts(part)
    slots = min(int(max(0.0, room - beside) // slot_bytes), stored.number)
    least = max(gather(beside + least_slots * slot_bytes))
    if not all(gather(slots >= least_slots)):  # all ranks offload experts, or none does
        _require_layers(saved, room, offload, least)
        return None
    store = ExpertStore(library, saved.folder / file.name, stored.layers, stored.part_bytes, slots, stored.numbers)
    blocks = {layer.layer: layer for layer in file.layers}
    nowhere = reserved(max(block.bytes for block in blocks.values()))  # takes no memory: nobody writes to it
    views = {layer: (nowhere, blocks[layer].offset) for layer in part.layers}
    place = Arena.reserved(outside_bytes(spec) + layers_bytes(spec, experts=False))
    with torch.inference_mode():
        weights = build_layers(StreamedWeights(saved, part, views, OF_EXPERTS), Builder(spec, place))
    return weights.with_experts_in(store)


def memory_for(spec: WeightSpec, saved: SavedWeights, experts: int) -> int:
    """Returns the bytes in which this number of experts fits beside everything else of the rank: `resident_gb` of the
    option `offload`, in bytes.
    """
    stored = stored_experts(saved, spec.part)
    assert stored is not None
    beside, slot_bytes = _sizes(spec, saved.manifest.files[spec.part.rank], stored)
    return beside + experts * slot_bytes


def _sizes(spec: WeightSpec, file: FileRecord, stored: StoredExperts) -> tuple[int, int]:
    """Returns the bytes of everything besides the experts, and the memory of an expert."""
    library = build.load(str(spec.dtype).removeprefix("torch."))
    return file.bytes - stored.bytes, ExpertStore.slot_bytes_of(library, stored.part_bytes)


def _require_layers(saved: SavedWeights, room: float, offload: Offload, least: int) -> None:
    """Raises UserError if `room` bytes of each rank are too few for layers, too, and layers would need more than
    `least` bytes, with which every rank could offload experts.
    """
    if room < least < max(WeightSizes.of_file(file).least(offload.slots) for file in saved.manifest.files):
        raise UserError(
            f"offload: got room for {room / 1e9:.3g} GB of weights; the least is resident_gb = "
            f"{rounded_up(least / 1e9)}, which holds everything besides the experts, and a few of them"
        )
