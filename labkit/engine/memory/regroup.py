"""Removes sequences from caches, and divides the sequences of caches anew. For caches on the CPU, in memory or in a
file; parts that lie side by side in memory are not copied. `regroup_slots.py` does the same in lent GPU memory.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from labkit.engine.memory.heads import StoredHeads
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.regroup_slots import keep_rows, regroup_slots


def rows_left(rows: int, ended: Container[int]) -> list[int]:
    """Returns the old row at each new place once the `ended` rows are gone. The last rows fill the gaps, so that few
    rows move.
    """
    left = [row for row in range(rows) if row not in ended]
    fillers = iter([row for row in left if row >= len(left)])
    return [next(fillers) if row in ended else row for row in range(len(left))]


def drop_rows(cache: KVCache, ended: Container[int]) -> None:
    """Removes the `ended` sequences from a cache. `rows_left` says where the other sequences are then."""
    left = rows_left(cache.batch_size, ended)
    moves = [(to, source) for to, source in enumerate(left) if to != source]
    if cache.pool is not None and cache.backing_store is None:
        keep_rows(cache, moves, len(left))
        return

    def kept(tensor: Tensor) -> Tensor:
        for to, source in moves:
            tensor[to] = tensor[source]
        part = tensor[: len(left)]
        return part if cache.pool is None else part.clone()  # slots that go back to the pool are cleared

    cache.select(kept, in_place=True)


def regroup_rows(sources: Sequence[KVCache], caches: Sequence[KVCache], sizes: Sequence[int]) -> None:
    """Divides the sequences of the caches `sources` anew among `caches`, in their order: `sizes[i]` sequences go to
    `caches[i]`. Earlier contents of `caches` that are not in `sources` are lost. With caches in files, `sources[0]`
    takes all sequences.

    All sources have the same length and, except on a GPU, the same capacity.
    """
    if sources[0].pool is not None:
        regroup_slots(sources, caches, sizes)
        return
    join_rows(sources)
    if [cache for cache, size in zip(caches, sizes, strict=True) if size] != [sources[0]]:
        divide_rows(sources[0], caches, sizes)


def join_rows(caches: Sequence[KVCache]) -> None:
    """Moves the sequences of all caches into the first cache, in this order. The other caches are empty then. All have
    the same length and capacity.
    """
    first, *others = caches
    if not others:
        return
    assert all((cache.length, cache.capacity) == (first.length, first.capacity) for cache in others)
    if any(cache.mask is not None for cache in caches):
        for cache in caches:
            if cache.mask is None:
                cache.mask = torch.ones(cache.batch_size, cache.capacity, dtype=torch.uint8)
    first.holes = any(cache.holes for cache in caches)
    first.reach = max(cache.reach for cache in caches)
    first.join(others)


def divide_rows(whole: KVCache, caches: Sequence[KVCache], sizes: Sequence[int]) -> None:
    """Divides the sequences of one cache among `caches`, which include it, in their order: `sizes[i]` sequences go to
    `caches[i]`. The parts lie side by side in the same memory, so that joining them again copies nothing.
    """
    assert sum(sizes) == whole.batch_size
    parts = zip(caches, sizes, accumulate(sizes), strict=True)
    for cache, size, end in sorted(parts, key=lambda part: part[0] is whole):  # `whole` comes last
        _share(whole, slice(end - size, end), cache)


def share_memory(caches: Sequence[KVCache], sizes: Sequence[int], slots: int) -> None:
    """Gives empty caches room for `slots` tokens of `sizes[i]` sequences each, side by side in one memory. Does nothing
    on a GPU, where each cache borrows its own memory.
    """
    if caches[0].pool is not None:
        return
    caches[0].reserve(sum(sizes), slots)
    divide_rows(caches[0], caches, sizes)


def _share(whole: KVCache, rows: slice, cache: KVCache) -> None:
    """Makes `cache` hold some of the sequences of `whole`, in the same memory."""
    assert isinstance(whole.heads, StoredHeads)
    cache.heads = whole.heads.part(slice(None))
    cache.length, cache.reach, cache.holes = whole.length, whole.reach, whole.holes
    cache.mask, cache.first, cache.positions = whole.mask, whole.first, whole.positions
    cache.select(lambda tensor: tensor[rows])


def cost_of_leaving(cache: KVCache, count: int) -> int:
    """Returns the bytes moved by removing `count` sequences from an offloaded cache: all sequences are read, and the
    remaining ones are written. Returns 0 for resident caches, where few bytes move.
    """
    return cache.heads.pass_bytes(2 * cache.batch_size - count) if cache.heads else 0


class EndedRows:
    """Sequences that have ended and are still in their cache.

    Removing them from an offloaded cache costs about as much as some steps, and nobody knows how many steps the other
    sequences will take. So they stay until steps have read as many useless bytes as the removal moves. This moves at
    most twice the bytes of the best choice.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache, self._wasted_bytes = cache, 0
        self._rows: set[int] = set()

    def leaving(self, ended: Iterable[int], at_once: bool = False) -> list[int]:
        """Returns the sequences to remove after a step in which the sequences `ended` have ended. at_once: all ended
        sequences, at any cost.
        """
        heads = self._cache.heads
        if heads is not None:
            self._wasted_bytes += heads.pass_bytes(len(self._rows))
        self._rows.update(ended)
        leave = at_once or self._wasted_bytes >= cost_of_leaving(self._cache, len(self._rows))
        return sorted(self._rows) if leave else []
