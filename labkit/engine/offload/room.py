"""Which layers stay in a rank's memory, and which pass through its slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import psutil
import torch

from labkit.engine.offload.options import Offload
from labkit.system.errors import UserError
from labkit.weights.checkpoint.manifest import FileRecord
from labkit.weights.checkpoint.save import Gather, together

OF_AVAILABLE = 0.7  # of the memory that is available, for weights; the cache, the workspace and others have the rest

T = TypeVar("T")


class WeightSizes(NamedTuple):
    """Bytes of what a rank holds: outside its layers, and of each layer by its number."""

    outside: int
    layers: dict[int, int]

    @classmethod
    def of_file(cls, file: FileRecord) -> WeightSizes:
        layers = {each.layer: each.bytes for each in file.layers}
        return cls(file.bytes - sum(layers.values()), layers)

    @property
    def all(self) -> int:
        return self.outside + sum(self.layers.values())

    @property
    def largest(self) -> int:
        """Of the layers: what a slot has to hold."""
        return max(self.layers.values())

    def least(self, slots: int) -> int:
        """That a rank cannot do without: what is outside the layers, and the slots; of few layers all of them."""
        return min(self.outside + slots * self.largest, self.all)


def residents(sizes: WeightSizes, room: float, slots: int) -> set[int]:
    """The layers that stay in memory: as many as `room` bytes hold, spread evenly among the others, so that those are
    read while these are computed.

    sizes: the largest of all ranks', so that all of them keep the same layers and wait for the same ones. Raises
    UserError for less room than the least that works.
    """
    count, least = len(sizes.layers), sizes.least(slots)
    if room >= sizes.all:
        return set(sizes.layers)
    if room < least:
        raise UserError(
            f"offload: got room for {room / 1e9:.3g} GB of weights; what is outside the layers takes "
            f"{sizes.outside / 1e9:.3g} GB and a slot {sizes.largest / 1e9:.3g} GB, so that the least is "
            f"resident_gb = {_rounded_up(least / 1e9)} with {slots} slots"
        )
    stay = min(int((room - least) // sizes.largest), max(0, count - slots - 1))
    return {layer for index, layer in enumerate(sizes.layers) if (index + 1) * stay // count > index * stay // count}


def room_for_weights(offload: Offload, ranks: int, device: torch.device) -> float:
    """Bytes that a rank may use for weights: of its GPU's memory, or where it has none, of its share of the machine's.

    Raises UserError for more than a GPU has free.
    """
    wanted = None if offload.resident_gb is None else offload.resident_gb * 1e9
    if device.type == "cpu":
        return OF_AVAILABLE * psutil.virtual_memory().available / ranks if wanted is None else wanted
    free = free_on_gpu(device)
    if wanted is not None and wanted > free:
        raise UserError(
            f"offload: got resident_gb = {offload.resident_gb}, and the GPU has {free / 1e9:.3g} GB free; pass less, "
            "which leaves room for the cache, too"
        )
    return OF_AVAILABLE * free if wanted is None else wanted


def made_by_all(make: Callable[[], T], gather: Gather) -> T:
    """What `make` gives, once all ranks have theirs. Where one rank fails all raise its error, so that none waits."""
    made: list[T] = []
    together(lambda: made.append(make()), gather)
    return made[0]


def free_on_gpu(device: torch.device) -> int:
    """Bytes that torch can still hand out there."""
    of_torch = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + of_torch


def _rounded_up(gigabytes: float) -> float:
    """To four digits that count."""
    unit = 10.0 ** (math.floor(math.log10(gigabytes)) - 3)
    return float(f"{math.ceil(gigabytes / unit) * unit:.4g}")
