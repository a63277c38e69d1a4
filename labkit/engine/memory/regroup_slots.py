"""Sequences that leave a cache on a GPU, and caches that become one there: in memory that is lent to them with the CUDA
graphs that were recorded on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.engine.memory.heads import StoredHeads
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.slots import Slots


def keep_rows(cache: KVCache, moves: Sequence[tuple[int, int]], count: int) -> None:
    """Sequences go where others have ended, (to, from), and the first `count` are those that are left.

    The slots stay, since another number of them would need a graph of its own, recorded while texts are under way. What
    nobody asks for any more is still computed, but sees nothing of what was there.
    """
    slots, length = cache.slots, cache.length
    assert isinstance(slots.heads, StoredHeads)
    if moves:
        to, source = (torch.tensor(rows, device=cache.device) for rows in zip(*moves, strict=True))
        for tensor in slots.heads.tensors:
            tensor[to, :, :length] = tensor[source, :, :length]
        for table in (slots.first, slots.positions, slots.visible):
            table[to] = table[source]
    slots.first[count:] = length
    cache.go_on_in(count)


def gather_rows(into: KVCache, parts: Sequence[tuple[KVCache, Sequence[int]]]) -> None:
    """`into`, which may be one of them, goes on with some sequences of several caches of one length, in this order."""
    first, pool, count = parts[0][0], into.pool, sum(len(rows) for _, rows in parts)
    assert pool is not None
    assert all(cache.length == first.length for cache, _ in parts)
    lent = pool.take(into, count, max(cache.capacity for cache, _ in parts))
    try:
        _fill(lent[0], parts, first.length)
    except BaseException:
        lent[1]()
        raise
    masked = any(cache.mask is not None for cache, _ in parts)
    into.holes = any(cache.holes for cache, _ in parts)
    into.length, into.mask = first.length, lent[0].visible[:count] if masked else None
    into.go_on_in(count, lent)


def empty(cache: KVCache) -> None:
    """Its sequences are elsewhere by now: what it has borrowed can be lent to others."""
    cache.select(lambda tensor: tensor.new_empty(0, *tensor.shape[1:]))


def _fill(slots: Slots, parts: Sequence[tuple[KVCache, Sequence[int]]], length: int) -> None:
    assert isinstance(slots.heads, StoredHeads)
    slots.visible.fill_(1)
    begin = 0
    for cache, rows in parts:
        assert isinstance(cache.heads, StoredHeads)
        at, source = slice(begin, begin + len(rows)), torch.tensor(rows, device=cache.device)

        def copy(mine: Tensor, theirs: Tensor | None, at: slice = at, source: Tensor = source) -> None:
            if theirs is not None:
                mine[at] = theirs[source]

        for mine, theirs in zip(slots.heads.tensors, cache.heads.tensors, strict=True):
            copy(mine[:, :, :length], theirs[:, :, :length])
        copy(slots.first, cache.first)
        copy(slots.positions[:, :length], None if cache.positions is None else cache.positions[:, :length])
        copy(slots.visible[:, :length], None if cache.mask is None else cache.mask[:, :length])
        begin += len(rows)
