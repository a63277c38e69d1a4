"""Sequences that leave a cache, and caches that become one. Of caches on the CPU, whose memory or file is their own."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor

from labkit.engine.memory.heads_on_disk import HeadsOnDisk
from labkit.engine.memory.kv_cache import KVCache


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

    def kept(tensor: Tensor) -> Tensor:
        for to, source in moves:
            tensor[to] = tensor[source]
        return tensor[: len(left)]

    cache.select(kept, in_place=True)


def join_rows(caches: Sequence[KVCache]) -> None:
    """Puts the sequences of several caches, of the same length and capacity, into the first, in this order."""
    first, *others = caches
    assert all((each.length, each.capacity) == (first.length, first.capacity) for each in others)
    if any(each.mask is not None for each in caches):
        for each in caches:
            if each.mask is None:
                each.mask = torch.ones(each.batch_size, each.capacity, dtype=torch.uint8)
    first.holes = any(each.holes for each in caches)
    first.reach = max(each.reach for each in caches)
    first.join(others)


def cost_of_leaving(cache: KVCache, count: int) -> int:
    """Bytes that move in a file when `count` sequences are taken out of it: all are read, and those left are written.
    None in memory, where few move.
    """
    if not isinstance(cache.heads, HeadsOnDisk):
        return 0
    return cache.heads.pass_bytes(2 * cache.batch_size - count)


class EndedRows:
    """Sequences of a cache that have ended and are still in it.

    To take them out of a file costs about as much as some steps, and nobody knows how many steps the others will take.
    So they stay until steps have read as much in vain as it costs: which moves at most twice the least that would have
    been enough.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache, self._in_vain = cache, 0
        self._rows: set[int] = set()

    def leaving(self, ended: Iterable[int]) -> list[int]:
        """Those that are to leave behind a step, in which these have ended."""
        heads = self._cache.heads
        if isinstance(heads, HeadsOnDisk):
            self._in_vain += heads.pass_bytes(len(self._rows))
        self._rows.update(ended)
        return sorted(self._rows) if self._in_vain >= cost_of_leaving(self._cache, len(self._rows)) else []
