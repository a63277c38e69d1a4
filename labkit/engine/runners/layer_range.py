"""The layers that a process holds, and what every way to run them needs."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

import torch
from torch import Tensor

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.place import CachePlace
from labkit.engine.memory.rotary import RotaryTables
from labkit.engine.memory.slots import SlotPool
from labkit.engine.parallel.ranks import Ranks
from labkit.engine.runners.step import Chunk, StepInput, placed_chunks
from labkit.kernels import ModelWeights
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.types import Rotary
from labkit.models.shards import Shard


class LayerRange:
    """A range of a model's layers, with or without embedding and head, as one implementation reads it.

    part: which layers, heads and rows these are. ranks: the way to the processes that have the other heads and rows of
    the same layers; None: they are whole. pool: where caches borrow their memory on a GPU; None: they have their own.
    kv_dtype: as caches store keys and values; None: in the type of what is not quantised. streamed: which of the layers
    are fetched when their turn comes; None: all are where they are needed. elsewhere: where keys and values are fetched
    from in the same way; None: they are where they are needed.
    `one_at_a_time`: threads may share an engine, and a step owns the workspace and the rotary tables.
    """

    def __init__(
        self,
        weights: ModelWeights,
        part: Shard,
        impl: str,
        device: torch.device,
        ranks: Ranks | None = None,
        pool: SlotPool | None = None,
        kv_dtype: torch.dtype | None = None,
        streamed: StreamedLayers | None = None,
        elsewhere: CachePlace | None = None,
    ) -> None:
        self.weights, self.part, self.impl, self.device, self.ranks = weights, part, impl, device, ranks
        self.pool, self.config, self.kv_dtype = pool, part.local, kv_dtype
        self.streamed, self.elsewhere = streamed, elsewhere
        self.rotary = RotaryTables(self.config.rotary, device)
        self.one_at_a_time = Lock()

    @property
    def stages(self) -> tuple[str, ...]:
        """Of one layer, in the order that they run in."""
        return self.weights.stages(self.part.size, self.streamed is not None, self.elsewhere is not None)

    @property
    def once_a_step(self) -> bool:
        """Whether a layer has to take all chunks of a step one after the other: weights, or keys and values, are
        there only while it is its turn.
        """
        return self.streamed is not None or self.elsewhere is not None

    def new_cache(self, capacity: int = 0) -> KVCache:
        """An empty cache for the layers that are here, which reserves `capacity` slots when it is first used."""
        return KVCache(self.config, self.weights.cache_dtype, capacity, self.pool, self.kv_dtype, self.elsewhere)

    def rotated(self, chunks: list[Chunk], cache: KVCache) -> tuple[list[Chunk], Rotary | None]:
        """The chunks of a step, and the rotary tables that their positions count in."""
        if self.rotary.holds(cache.reach, cache):
            return chunks, self.rotary.reaching(cache.reach)
        rows, tables = self.rotary.of([chunk.rows for chunk in chunks])
        return [chunk._replace(rows=each) for chunk, each in zip(chunks, rows, strict=True)], tables

    def results(self, step: StepInput, run: Callable[[list[Chunk]], list[Tensor | None]]) -> list[Tensor]:
        """What `run` gives for the chunks of a step, where they give something: for one chunk after the other, or for
        all of them at once where the layers, or keys and values, are fetched once a step.
        """
        found: list[Tensor | None] = []
        if self.once_a_step:
            with self.one_at_a_time:
                found = run(list(placed_chunks(step, self.device)))
        else:
            for chunk in placed_chunks(step, self.device):
                with self.one_at_a_time:
                    found += run([chunk])
        return [part for part in found if part is not None]
