"""The memory of KV caches on a GPU, lent to one cache after another with the graphs that were recorded on it.

A CUDA graph reads and writes the addresses that it was recorded with. So a cache that ends gives its memory back, and
the next one of its size goes on with it, and with its graphs.
"""

import weakref
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor

from labkit.engine.memory.heads import StoredHeads
from labkit.engine.memory.heads_on_host import HeadsOnHost, HostMemory
from labkit.engine.memory.place import HeadStore
from labkit.kernels.cache_stream.device import CacheSlots
from labkit.models.config import ModelConfig

BUCKETS = (1, 2, 4, 8, 16)
BLOCK = 128  # slots by which capacities differ at least, so that a slightly longer text still finds a graph


def bucket(batch: int) -> int:
    """Sequences that are computed for a batch: the next power of two up to 16, beyond that the batch itself."""
    return next((size for size in BUCKETS if size >= batch), batch)


@dataclass(eq=False)
class Slots:
    """Keys and values of `bucket` sequences, or what they pass through, and what else a decode step reads or moves on.

    `visible` counts only for a cache with holes. `at`: the number of tokens that `tokens`, `next_positions` and `past`
    stand at; -1 if they are to be set anew.
    """

    heads: StoredHeads | CacheSlots
    first: Tensor
    visible: Tensor
    positions: Tensor
    tokens: Tensor
    next_positions: Tensor
    past: Tensor
    at: int = -1
    recordings: dict[Any, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """(sequences, slots of each)."""
        return self.positions.shape[0], self.positions.shape[1]


Lent: TypeAlias = tuple[Slots, weakref.finalize]  # and what gives them back


class SlotPool:
    """Makes slots for one model on one device, and keeps those that came back. dtype: as keys and values are stored.
    memory: where they lie beside the device; None: they lie in the slots.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, memory: HostMemory | None = None
    ) -> None:
        self.config, self.dtype, self.device, self.memory = config, dtype, device, memory
        self.free: list[Slots] = []
        self._one_at_a_time = Lock()

    def take(self, owner: object, batch: int, capacity: int) -> Lent:
        """Slots for at least `batch` sequences of `capacity` tokens. They come back when `owner` is collected, or when
        the finalizer that is returned with them is called.
        """
        wanted, capacity = bucket(batch), -(-capacity // BLOCK) * BLOCK
        sizes = range(capacity, 2 * capacity + 1)
        with self._one_at_a_time:
            fitting = [slots for slots in self.free if slots.shape[0] == wanted and slots.shape[1] in sizes]
            slots = min(fitting, key=lambda slots: slots.shape[1], default=None)
            if slots is None:  # those of other buckets stay, with their graphs
                self.free[:] = [each for each in self.free if each.shape[0] != wanted]
            else:
                self.free.remove(slots)
        if slots is None:
            with torch.inference_mode(False):  # who takes them next may write to them outside of it
                slots = self._make(wanted, capacity)
        slots.at = -1
        slots.first.zero_()
        slots.positions.zero_()  # also of sequences that are only computed: tables are read there too
        return slots, weakref.finalize(owner, self.free.append, slots)

    def drop_unrecorded(self) -> None:
        """Keeps of what came back only what graphs were recorded on: other memory is soon made anew."""
        self.free[:] = [slots for slots in self.free if slots.recordings]

    def settle(self, slots: Slots, heads: HeadStore | None, batch: int, capacity: int, length: int) -> HeadStore:
        """Keys and values of `batch` sequences in these slots, or passing through them: the first `length` tokens of
        `heads`, or room for new ones. Raises UserError where there is too little memory.
        """
        if self.memory is None:
            assert isinstance(slots.heads, StoredHeads)
            mine = slots.heads.first(batch)
            if heads is not None:
                assert isinstance(heads, StoredHeads)
                mine.take(heads, length)
            return mine
        assert isinstance(slots.heads, CacheSlots)
        if heads is None:
            heads = self.memory.zeros(self.config, self.dtype, batch, capacity)
        assert isinstance(heads, HeadsOnHost)
        if heads.capacity < capacity:
            heads.grow(capacity)
        heads.pass_through(slots.heads, slots.past)
        return heads

    def _make(self, batch: int, capacity: int) -> Slots:
        try:
            return self._filled_with_zeros(batch, capacity)
        except torch.OutOfMemoryError:
            self.free.clear()
            return self._filled_with_zeros(batch, capacity)

    def _filled_with_zeros(self, batch: int, capacity: int) -> Slots:
        def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=self.device)

        if self.memory is None:
            heads: StoredHeads | CacheSlots = StoredHeads.zeros(self.config, self.dtype, batch, capacity, self.device)
        else:
            heads = self.memory.slots_for(self.config, self.dtype, batch, capacity)
        return Slots(
            heads=heads,
            first=zeros(batch),
            visible=zeros(batch, capacity, dtype=torch.uint8),
            positions=zeros(batch, capacity),
            tokens=zeros(batch, dtype=torch.int64),
            next_positions=zeros(batch),
            past=zeros(1),
        )
