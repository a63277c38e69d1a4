"""Sequences that leave a cache, and caches that become one."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from labkit.engine.memory.heads import StoredHeads
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.regroup_slots import empty, gather_rows, keep_rows


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
    if cache.pool is not None:
        keep_rows(cache, moves, len(left))
        return

    def kept(tensor: Tensor) -> Tensor:
        for to, source in moves:
            tensor[to] = tensor[source]
        return tensor[: len(left)]

    cache.select(kept)


def join_rows(caches: Sequence[KVCache]) -> None:
    """Puts the sequences of several caches of one length, on a CPU also of one capacity, into the first, in order."""
    first, *others = caches
    if first.pool is not None:
        gather_rows(first, [(each, range(each.batch_size)) for each in caches])
        for each in others:
            empty(each)
        first.pool.drop_unrecorded()  # of a prompt, while the next caches become one
        return
    assert all((each.length, each.capacity) == (first.length, first.capacity) for each in others)
    if any(each.mask is not None for each in caches):
        for each in caches:
            if each.mask is None:
                each.mask = torch.ones(each.batch_size, each.capacity, dtype=torch.uint8)
    first.holes = any(each.holes for each in caches)
    first.reach = max(each.reach for each in caches)
    theirs = [iter(_tensors(each)) for each in others]
    first.select(lambda tensor: torch.cat([tensor, *map(next, theirs)]))


def _tensors(cache: KVCache) -> list[Tensor]:
    """In the order in which `select` takes them."""
    assert isinstance(cache.heads, StoredHeads)
    found = [*cache.heads.tensors, cache.mask, cache.first, cache.positions]
    return [tensor for tensor in found if tensor is not None]
