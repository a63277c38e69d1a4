"""Keys and values of all layers in the host's memory. A pass over the layers has a few of them on a GPU at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import psutil
import torch
from torch import Tensor

from labkit.engine.memory.heads import StoredHeads
from labkit.engine.memory.stores import BackingStore
from labkit.kernels.cache_stream import CachePass
from labkit.kernels.cache_stream.device import CacheSlots, DeviceCacheStream
from labkit.kernels.cache_stream.host import HostCache, TokenShape
from labkit.kernels.slot_stream import StreamSpan
from labkit.kernels.slot_stream.queues import DeviceSpans, Queues
from labkit.kernels.types import LayerCache, padded_head_dim
from labkit.models.config import ModelConfig
from labkit.system.errors import UserError


@dataclass(frozen=True)
class HostMemory(BackingStore):
    """Host memory as the backing store of KV caches of an engine on a GPU. The GPU has `slots` layers of each cache:
    kernels use one, and the others are being copied.
    """

    name = "the host"

    device: torch.device
    queues: Queues  # of `device`
    ranks_here: int  # ranks of the model on this machine

    def zeros(self, config: ModelConfig, dtype: torch.dtype, batch: int, capacity: int) -> HeadsOnHost:
        shape = _shape(config, dtype, batch)
        host = self.on_all_ranks(lambda: self._made(shape, config.num_layers, capacity))
        return HeadsOnHost(self, host, capacity, length=0)

    def slots_for(self, config: ModelConfig, dtype: torch.dtype, batch: int, capacity: int) -> CacheSlots:
        """Returns GPU memory for passes over caches of up to `batch` sequences of up to `capacity` tokens."""
        working = StoredHeads.zeros(config, dtype, batch, capacity, self.device, layers=1)
        count = min(self.slots - 1, config.num_layers)
        return CacheSlots(self.queues, count, capacity * _shape(config, dtype, batch).token_bytes, working.layer(0, 0))

    def require_room(self, shape: TokenShape, capacity: int, needed: int) -> None:
        """Raises UserError unless this machine has `needed` bytes for each rank on it."""
        needed, available = needed * self.ranks_here, psutil.virtual_memory().available
        if needed > available:
            raise UserError(
                f"kv_offload: keys and values of {shape.batch} x {capacity} tokens need {needed} bytes of the host's "
                f"memory, which has {available} available; give fewer tokens or sequences, or kv_dtype=torch.int8"
            )

    def _made(self, shape: TokenShape, layers: int, capacity: int) -> HostCache:
        self.require_room(shape, capacity, layers * capacity * shape.token_bytes)
        return HostCache(self.queues, shape, layers, capacity)


def _shape(config: ModelConfig, dtype: torch.dtype, batch: int) -> TokenShape:
    return TokenShape(batch, config.num_kv_heads, padded_head_dim(config.head_dim), dtype)


class HeadsOnHost:
    """Like StoredHeads, but in the host's memory: a layer is on the GPU from its turn in a pass until the next layer's
    turn, in slots that were lent by `pass_through`.
    """

    def __init__(self, memory: HostMemory, host: HostCache, capacity: int, length: int) -> None:
        """capacity: tokens per sequence that all ranks have room for.
        length: tokens per sequence in the host's memory.
        """
        self.memory, self.capacity, self._host, self._length = memory, capacity, host, length
        # Stream of layers through the lent slots. Other slots have another stream. None: no slots are lent.
        self.stream: DeviceCacheStream | None = None
        self._spans = DeviceSpans(memory.queues)

    @property
    def batch(self) -> int:
        return self._host.shape.batch

    def pass_through(self, slots: CacheSlots, counter: Tensor) -> None:
        """Makes the layers pass through these slots from now on. counter: int32 [1] on the GPU, the number of tokens
        before a step.
        """
        self.stream = DeviceCacheStream(self._host, slots, self._length, self._spans, counter)

    def layer(self, index: int, past: int, counter: Tensor | None = None) -> LayerCache:
        assert self.stream is not None, "no slots have been lent"
        return self.stream.layer(index, past)

    def begin_pass(self, written: range) -> CachePass:
        assert self.stream is not None, "no slots have been lent"
        self._length = written.stop
        return self.stream.begin_pass(written)

    def layers_in_order(self, written: range) -> Iterator[LayerCache]:
        return self.begin_pass(written).layers_in_order(self._host.layers)

    def change(self, made_of: Callable[[Tensor], Tensor]) -> None:
        """Changes the sequences as in StoredHeads, and ends the use of the lent slots."""
        rows = made_of(torch.arange(self.batch, device=self.memory.device)).cpu()

        def changed() -> HostCache:
            if len(rows) != self.batch:
                self._require_room_for(len(rows))
            return self._host.select(rows, self._length)

        self._host = self.memory.on_all_ranks(changed)
        self.stream = None

    def shrink(self, made_of: Callable[[Tensor], Tensor]) -> None:
        """Like `change`, to at most the present number of sequences. Needs extra room for one layer only. A failure
        loses all sequences.
        """
        rows = made_of(torch.arange(self.batch, device=self.memory.device)).cpu()
        shape = replace(self._host.shape, batch=len(rows))

        def shrunk() -> None:
            self.memory.require_room(shape, self.capacity, self.capacity * shape.token_bytes)
            self._host.shrink(rows, self._length)

        self.memory.on_all_ranks(shrunk)
        self.stream = None

    def join(self, others: Sequence[HeadsOnHost]) -> NoReturn:
        raise RuntimeError("caches offloaded to the host are not joined: both copies would be in its memory")

    def pass_bytes(self, sequences: int) -> int:
        """Returns the bytes that a pass copies to the device for `sequences` sequences."""
        return self._host.layers * self._length * replace(self._host.shape, batch=sequences).token_bytes

    def grow(self, capacity: int) -> None:
        shape, host = self._host.shape, self._host
        new = host.layers * capacity * shape.token_bytes
        most = new - host.bytes + capacity * shape.token_bytes  # the largest layer is in memory twice for a while

        def grown() -> None:
            self.memory.require_room(shape, capacity, most)
            host.grow(capacity, self._length)

        self.memory.on_all_ranks(grown)
        self.capacity = capacity

    def copied(self) -> HeadsOnHost:
        def made() -> HostCache:
            self._require_room_for(self.batch)
            return self._host.copied(torch.arange(self.batch), self._length)

        return HeadsOnHost(self.memory, self.memory.on_all_ranks(made), self.capacity, self._length)

    def take_spans(self) -> list[StreamSpan]:
        return self._spans.take()

    def _require_room_for(self, batch: int) -> None:
        shape = replace(self._host.shape, batch=batch)
        self.memory.require_room(shape, self.capacity, self._host.layers * self.capacity * shape.token_bytes)
