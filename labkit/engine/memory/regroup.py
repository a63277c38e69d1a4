"""Sequences that leave a cache, and caches whose sequences are divided anew: of caches on the CPU, in memory or in a
file. Where memory lies side by side, none of it is copied. `regroup_slots.py` has the same for memory that is lent to
caches on a GPU.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from labkit.engine.memory.heads import StoredHeads
from labkit.engine.memory.heads_on_disk import HeadsOnDisk
from labkit.engine.memory.heads_on_host import HeadsOnHost
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.regroup_slots import keep_rows, regroup_slots


def rows_left(rows: int, ended: Container[int]) -> list[int]:
    """Which of the old rows is where, once those that have ended are gone: the last ones take their places, so that few
    move.
    """
    left = [row for row in range(rows) if row not in ended]
    behind = iter([row for row in left if row >= len(left)])
    return [next(behind) if row in ended else row for row in range(len(left))]


def drop_rows(cache: KVCache, ended: Container[int]) -> None:
    """Takes sequences out of a cache; where the others are then, `rows_left` says."""
    left = rows_left(cache.batch_size, ended)
    moves = [(to, source) for to, source in enumerate(left) if to != source]
    if cache.pool is not None and cache.elsewhere is None:
        keep_rows(cache, moves, len(left))
        return

    def kept(tensor: Tensor) -> Tensor:
        for to, source in moves:
            tensor[to] = tensor[source]
        part = tensor[: len(left)]
        return part if cache.pool is None else part.clone()  # slots that go back to the pool are cleared

    cache.select(kept, in_place=True)


def regroup_rows(held: Sequence[KVCache], caches: Sequence[KVCache], sizes: Sequence[int]) -> None:
    """Divides the sequences of the caches `held`, which have the same length and capacity, anew among `caches`, in
    their order: so many to each. Whatever the others of these hold is forgotten. Of caches in files the first of those
    held takes all. On a GPU capacities may differ.
    """
    if held[0].pool is not None:
        regroup_slots(held, caches, sizes)
        return
    join_rows(held)
    if [cache for cache, size in zip(caches, sizes, strict=True) if size] != [held[0]]:
        divide_rows(held[0], caches, sizes)


def join_rows(caches: Sequence[KVCache]) -> None:
    """Puts the sequences of several caches, of the same length and capacity, into the first, in this order. The others
    are empty then.
    """
    first, *others = caches
    if not others:
        return
    assert all((each.length, each.capacity) == (first.length, first.capacity) for each in others)
    if any(each.mask is not None for each in caches):
        for each in caches:
            if each.mask is None:
                each.mask = torch.ones(each.batch_size, each.capacity, dtype=torch.uint8)
    first.holes = any(each.holes for each in caches)
    first.reach = max(each.reach for each in caches)
    first.join(others)


def divide_rows(whole: KVCache, caches: Sequence[KVCache], sizes: Sequence[int]) -> None:
    """Divides the sequences of one cache among `caches`, itself and others, in their order: so many to each. They lie
    in the same memory side by side, so that joining them again copies nothing.
    """
    assert sum(sizes) == whole.batch_size
    parts = zip(caches, sizes, accumulate(sizes), strict=True)
    for cache, size, end in sorted(parts, key=lambda part: part[0] is whole):  # itself at last
        _share(whole, slice(end - size, end), cache)


def share_memory(caches: Sequence[KVCache], sizes: Sequence[int], slots: int) -> None:
    """Gives empty caches room for `slots` tokens of so many sequences each, in one memory side by side. On a GPU
    memory is lent to each by itself.
    """
    if caches[0].pool is not None:
        return
    caches[0].reserve(sum(sizes), slots)
    divide_rows(caches[0], caches, sizes)


def _share(whole: KVCache, rows: slice, cache: KVCache) -> None:
    """Makes a cache one of some of another's sequences, in the same memory."""
    assert isinstance(whole.heads, StoredHeads)
    cache.heads = whole.heads.part(slice(None))
    cache.length, cache.reach, cache.holes = whole.length, whole.reach, whole.holes
    cache.mask, cache.first, cache.positions = whole.mask, whole.first, whole.positions
    cache.select(lambda tensor: tensor[rows])


def cost_of_leaving(cache: KVCache, count: int) -> int:
    """Bytes that move where `count` sequences are taken out of a file, or out of the memory beside a GPU: all are read,
    and those left are written. None where they are computed with, where few move.
    """
    if not isinstance(cache.heads, HeadsOnDisk | HeadsOnHost):
        return 0
    return cache.heads.pass_bytes(2 * cache.batch_size - count)


class EndedRows:
    """Sequences of a cache that have ended and are still in it.

    To take them out of a file, or of the memory beside a GPU, costs about as much as some steps, and nobody knows how
    many steps the others will take. So they stay until steps have read as much in vain as it costs: which moves at most
    twice the least that would have been enough.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache, self._in_vain = cache, 0
        self._rows: set[int] = set()

    def leaving(self, ended: Iterable[int], at_once: bool = False) -> list[int]:
        """Those that are to leave behind a step, in which these have ended. at_once: all, whatever that costs."""
        heads = self._cache.heads
        if isinstance(heads, HeadsOnDisk | HeadsOnHost):
            self._in_vain += heads.pass_bytes(len(self._rows))
        self._rows.update(ended)
        leave = at_once or self._in_vain >= cost_of_leaving(self._cache, len(self._rows))
        return sorted(self._rows) if leave else []
