"""Choice of the resident layers of a rank. The other layers pass through its slots."""

from __future__ import annotations

import math
from typing import NamedTuple

import psutil
import torch

from labkit.engine.offload.options import SLOTS_PER_CHOICE, Offload
from labkit.models.shards import Shard
from labkit.system.errors import UserError
from labkit.weights.checkpoint.manifest import FileRecord

OF_AVAILABLE = 0.7  # share of the available memory for weights; the rest is for cache, workspace and other uses


class WeightSizes(NamedTuple):
    """Bytes of a rank's weights."""

    outside: int  # outside the layers
    layers: dict[int, int]  # layer number to bytes

    @classmethod
    def of_file(cls, file: FileRecord) -> WeightSizes:
        layers = {layer.layer: layer.bytes for layer in file.layers}
        return cls(file.bytes - sum(layers.values()), layers)

    @property
    def all(self) -> int:
        return self.outside + sum(self.layers.values())

    @property
    def largest(self) -> int:
        """Bytes of the largest layer, which a slot has to hold."""
        return max(self.layers.values())

    def least(self, slots: int) -> int:
        """Returns the least bytes that work: the weights outside the layers, and the slots; at most all weights."""
        return min(self.outside + slots * self.largest, self.all)


def residents(sizes: WeightSizes, room: float, slots: int) -> set[int]:
    """Returns the resident layers: as many as fit into `room` bytes. They are spread evenly among the offloaded layers,
    so that offloaded layers are read while resident ones are computed.

    sizes: of the rank with the largest weights, so that all ranks keep the same layers and wait for the same ones.
    Raises UserError for less room than the least that works.
    """
    count, least = len(sizes.layers), sizes.least(slots)
    if room >= sizes.all:
        return set(sizes.layers)
    if room < least:
        raise UserError(
            f"offload: got room for {room / 1e9:.3g} GB of weights; the weights outside the layers take "
            f"{sizes.outside / 1e9:.3g} GB and a slot {sizes.largest / 1e9:.3g} GB, so that the least is "
            f"resident_gb = {rounded_up(least / 1e9)} with {slots} slots"
        )
    stay = min(int((room - least) // sizes.largest), max(0, count - slots - 1))
    return {layer for index, layer in enumerate(sizes.layers) if (index + 1) * stay // count > index * stay // count}


def room_for_weights(offload: Offload, ranks: int, device: torch.device) -> float:
    """Returns the bytes that a rank may use for weights: of its GPU's memory, or of its share of the machine's memory.

    Raises UserError for more than a GPU has free.
    """
    requested = None if offload.resident_gb is None else offload.resident_gb * 1e9
    if device.type == "cpu":
        return OF_AVAILABLE * psutil.virtual_memory().available / ranks if requested is None else requested
    free = free_on_gpu(device)
    if requested is not None and requested > free:
        raise UserError(
            f"offload: got resident_gb = {offload.resident_gb}, and the GPU has {free / 1e9:.3g} GB free; pass less, "
            "which leaves room for the cache, too"
        )
    return OF_AVAILABLE * free if requested is None else requested


def free_on_gpu(device: torch.device) -> int:
    """Returns the bytes that torch can still allocate on the GPU."""
    of_torch = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + of_torch


def fewest_experts(part: Shard) -> int:
    """Returns the fewest experts that a rank needs in memory; 0 for a model without experts."""
    experts, own = part.config.experts, len(part.experts)
    mixtures = sum(map(part.config.has_experts, part.layers))
    return min(SLOTS_PER_CHOICE * min(experts.chosen, own), mixtures * own) if experts else 0


def rounded_up(gigabytes: float) -> float:
    """Returns the number rounded up to four significant digits."""
    unit = 10.0 ** (math.floor(math.log10(gigabytes)) - 3)
    return float(f"{math.ceil(gigabytes / unit) * unit:.4g}")
