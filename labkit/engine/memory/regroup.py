"""Sequences that leave a cache, and caches whose sequences are divided anew: of caches on the CPU. Where their memory
lies side by side, none of it is copied.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from labkit.engine.memory.heads import StoredHeads
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

    cache.select(kept)


def regroup_rows(caches: Sequence[KVCache], sizes: Sequence[int]) -> None:
    """Divides the sequences of all these caches anew, in their order: so many to each. Those that are not empty have
    the same length and capacity.
    """
    held = [cache for cache in caches if cache.batch_size]
    join_rows(held)
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
    theirs = [iter(_tensors(each)) for each in others]
    first.select(lambda tensor: _in_one([tensor, *map(next, theirs)]))
    for each in others:
        each.select(lambda tensor: tensor.new_empty(0, *tensor.shape[1:]))


def divide_rows(whole: KVCache, caches: Sequence[KVCache], sizes: Sequence[int]) -> None:
    """Divides the sequences of one cache among `caches`, which are empty but for itself: so many to each, in their
    order. They lie in the same memory side by side, so that joining them again copies nothing.
    """
    assert sum(sizes) == whole.batch_size
    tensors, begin = _tensors(whole), 0
    for cache, size in zip(caches, sizes, strict=True):
        if cache is not whole:
            _empty_like(whole, cache)
        parts = iter([tensor[begin : begin + size] for tensor in tensors])
        cache.select(lambda _, parts=parts: next(parts))
        begin += size


def share_memory(caches: Sequence[KVCache], sizes: Sequence[int], slots: int) -> None:
    """Gives empty caches room for `slots` tokens of so many sequences each, in one memory side by side."""
    caches[0].reserve(sum(sizes), slots)
    divide_rows(caches[0], caches, sizes)


def _empty_like(whole: KVCache, cache: KVCache) -> None:
    """Makes an empty cache one that can take some of the sequences of another."""
    assert isinstance(whole.heads, StoredHeads)
    cache.heads, cache.length, cache.reach, cache.holes = whole.heads.first(0), whole.length, whole.reach, whole.holes
    cache.mask, cache.first, cache.positions = whole.mask, whole.first, whole.positions


def _in_one(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts: where they lie, if that is side by side in one memory, else copied."""
    first, place = parts[0], parts[0].data_ptr()
    for each in parts:
        if each.data_ptr() != place or each.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(parts))
        place += each.nbytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _tensors(cache: KVCache) -> list[Tensor]:
    """In the order in which `select` takes them."""
    assert isinstance(cache.heads, StoredHeads)
    found = [*cache.heads.tensors, cache.mask, cache.first, cache.positions]
    return [tensor for tensor in found if tensor is not None]
