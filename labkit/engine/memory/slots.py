"""Memory of KV caches on a GPU, lent to one cache after another together with the CUDA graphs recorded on it.

A CUDA graph reads and writes the addresses that it was recorded with. So a cache that ends returns its memory, and the
next cache of its size reuses the memory and the graphs.
"""

import weakref
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.engine.memory.heads import StoredHeads
from labkit.engine.memory.heads_on_host import HeadsOnHost, HostMemory
from labkit.engine.memory.stores import HeadStore
from labkit.kernels.cache_stream.device import CacheSlots
from labkit.models.config import ModelConfig
from labkit.system.rounding import round_up

BUCKETS = (1, 2, 4, 8, 16)
BLOCK = 128  # capacities are multiples of this many slots, so that a slightly longer text still finds a graph


def bucket(batch: int) -> int:
    """Returns the number of sequences computed for a batch: the next power of two up to 16, above 16 the batch."""
    return next((size for size in BUCKETS if size >= batch), batch)


@dataclass(eq=False)
class Slots:
    """GPU memory of `bucket` sequences: keys and values, or the slots that they pass through, and the tables that a
    decode step reads or advances.
    """

    heads: StoredHeads | CacheSlots
    first: Tensor
    visible: Tensor  # read only for a cache with holes
    positions: Tensor
    tokens: Tensor
    next_positions: Tensor
    past: Tensor
    at: int = -1  # cache length for which `tokens`, `next_positions` and `past` are set; -1: not set
    recordings: dict[Any, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """(sequences, slots of each)."""
        return self.positions.shape[0], self.positions.shape[1]


class Lent(NamedTuple):
    """Slots that a cache has borrowed from a pool."""

    slots: Slots
    give_back: weakref.finalize


class SlotPool:
    """Makes slots for one model on one device, and keeps returned slots for reuse.

    dtype: of the stored keys and values.
    memory: backing store of keys and values in the host's memory; None: they are resident in the slots.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, memory: HostMemory | None = None
    ) -> None:
        self.config, self.dtype, self.device, self.memory = config, dtype, device, memory
        self.free: list[Slots] = []
        self._one_at_a_time = Lock()

    def take(self, owner: object, batch: int, capacity: int) -> Lent:
        """Lends slots for at least `batch` sequences of `capacity` tokens. They return to the pool when `owner` is
        garbage collected, or by `give_back`.
        """
        sequences, capacity = bucket(batch), round_up(capacity, BLOCK)
        sizes = range(capacity, 2 * capacity + 1)
        with self._one_at_a_time:
            fitting = [slots for slots in self.free if slots.shape[0] == sequences and slots.shape[1] in sizes]
            slots = min(fitting, key=lambda slots: slots.shape[1], default=None)
            if slots is None:  # free slots of other buckets stay, with their graphs
                self.free[:] = [unused for unused in self.free if unused.shape[0] != sequences]
            else:
                self.free.remove(slots)
        if slots is None:
            with torch.inference_mode(False):  # a later owner may write to them outside of inference mode
                slots = self._make(sequences, capacity)
        slots.at = -1
        slots.first.zero_()
        slots.positions.zero_()  # also for the bucket's unused sequences: kernels read their positions too
        return Lent(slots, weakref.finalize(owner, self.free.append, slots))

    def drop_unrecorded(self) -> None:
        """Frees returned slots that have no recorded graph: they are quickly made again."""
        with self._one_at_a_time:
            self.free[:] = [slots for slots in self.free if slots.recordings]

    def attach(self, slots: Slots, heads: HeadStore | None, batch: int, capacity: int, length: int) -> HeadStore:
        """Returns keys and values of `batch` sequences that are in these slots or pass through them. They hold the
        first `length` tokens of `heads`; None: they are empty. Raises UserError if there is too little memory.
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
            with self._one_at_a_time:
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
