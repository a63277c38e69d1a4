"""The layers of a process, with the settings that every runner needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.rotary import RotaryTables
from labkit.engine.memory.slots import SlotPool
from labkit.engine.memory.stores import BackingStore
from labkit.engine.parallel.ranks import Ranks
from labkit.engine.runners.step import Chunk, StepInput, placed_chunks
from labkit.kernels import ModelWeights
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.types import Rotary
from labkit.stages import Stage
from labkit.weights.spec import WeightSpec


@dataclass(eq=False)
class LayerRange:
    """Range of a model's layers, with or without embedding and head, packed for one implementation.

    ranks: rank group with the other heads and rows of the same layers; None: the layers are whole.
    pool: lends GPU memory to caches; None: caches have their own memory.
    kv_dtype: of stored keys and values; None: the type of weights that are not quantised.
    streamed: the offloaded layers; None: all layers are resident.
    backing_store: backing store of offloaded keys and values; None: they are resident.
    one_at_a_time: lock of a step, which owns the workspace and the rotary tables: threads may share an engine.
    """

    spec: WeightSpec
    weights: ModelWeights
    device: torch.device
    ranks: Ranks | None = None
    pool: SlotPool | None = None
    kv_dtype: torch.dtype | None = None
    streamed: StreamedLayers | None = None
    backing_store: BackingStore | None = None
    one_at_a_time: Lock = field(default_factory=Lock, init=False)

    def __post_init__(self) -> None:
        self.config, self.impl = self.spec.part.local, self.spec.impl
        self._rotary = RotaryTables(self.config.rotaries, self.device)
        self._long_rotary = RotaryTables(self.config.long_rotaries, self.device)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of one layer, in the order of execution."""
        return self.weights.stages(self.spec.part.size, self.streamed is not None, self.backing_store is not None)

    @property
    def once_a_step(self) -> bool:
        """Whether all chunks of a step go through a layer before the next layer: offloaded weights, or keys and values,
        are resident only during the layer's turn.
        """
        parts = (self.streamed, self.weights.expert_store, self.backing_store)
        return any(part is not None for part in parts)

    def chooses_tokens(self, step: StepInput) -> bool:
        """Whether these layers are the whole model, from tokens to all logits, so that a step may choose the tokens of
        the next one. A stage of a pipeline gets rows, and its leader chooses.
        """
        return step.tokens is not None and self.weights.head is not None and self.ranks is None

    def new_cache(self, capacity: int = 0) -> KVCache:
        """Returns an empty cache for these layers, which reserves `capacity` slots at its first use."""
        return KVCache(self.config, self.weights.cache_dtype, capacity, self.pool, self.kv_dtype, self.backing_store)

    def rotary_of(self, cache: KVCache) -> RotaryTables:
        """The rotary tables for the length of a cache's texts."""
        return self._long_rotary if cache.long_text else self._rotary

    def rotated(self, chunks: list[Chunk], cache: KVCache) -> tuple[list[Chunk], Rotary | None]:
        """Returns the chunks of a step, with the rotary tables that their positions index."""
        rotary = self.rotary_of(cache)
        if rotary.holds(cache.reach, cache):
            return chunks, rotary.reaching(cache.reach)
        rows, tables = rotary.of([chunk.rows for chunk in chunks])
        return [chunk._replace(rows=part) for chunk, part in zip(chunks, rows, strict=True)], tables

    def results(self, step: StepInput, run: Callable[[list[Chunk]], list[Tensor | None]]) -> list[Tensor]:
        """Returns the results of `run` for the chunks of a step, without None. `run` gets one chunk after the other, or
        all at once if layers, or keys and values, are fetched once a step.
        """
        results: list[Tensor | None] = []
        if self.once_a_step:
            with self.one_at_a_time:
                results = run(list(placed_chunks(step, self.device)))
        else:
            for chunk in placed_chunks(step, self.device):
                with self.one_at_a_time:
                    results += run([chunk])
        return [part for part in results if part is not None]
