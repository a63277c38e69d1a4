"""Sequences that leave a cache on a GPU, and caches whose sequences are divided anew there: in memory that is lent to
them with the CUDA graphs that were recorded on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

import torch

from labkit.engine.memory.heads import StoredHeads
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.slots import Lent, Slots


def keep_rows(cache: KVCache, moves: Sequence[tuple[int, int]], count: int) -> None:
    """Sequences go where others have ended, (to, from), and the first `count` are those that are left.

    The slots stay, since another number of them would need a graph of its own, recorded while texts are under way. What
    nobody asks for any more is still computed, but sees nothing of what was there.
    """
    if not count:
        _empty(cache)
        return
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


def regroup_slots(held: Sequence[KVCache], caches: Sequence[KVCache], sizes: Sequence[int]) -> None:
    """Divides the sequences of the caches `held`, which have the same length, anew among `caches`, in their order: so
    many to each. Whatever the others of these hold is forgotten. Keys and values are there twice for a moment.
    """
    sequences = [(cache, row) for cache in held for row in range(cache.batch_size)]
    assert sum(sizes) == len(sequences)
    parts = [sequences[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    gather_rows([(cache, part) for cache, part in zip(caches, parts, strict=True) if part])
    for cache, size in zip(caches, sizes, strict=True):
        if not size and cache.is_initialized:
            _empty(cache)
    pool = held[0].pool
    assert pool is not None
    pool.drop_unrecorded()  # of a prompt, while the next caches are divided


def gather_rows(wanted: Sequence[tuple[KVCache, Sequence[tuple[KVCache, int]]]]) -> None:
    """Each of the caches goes on with sequences of several ones of the same length, in this order. They may be among
    these: nothing is given back before all are in their new places.
    """
    filled: list[tuple[KVCache, Lent, bool, bool]] = []
    try:
        for into, sequences in wanted:
            sources = {id(cache): cache for cache, _ in sequences}.values()
            assert into.pool is not None
            lent = into.pool.take(into, len(sequences), max(cache.capacity for cache in sources))
            masked, holes = (any(each) for each in zip(*((s.mask is not None, s.holes) for s in sources), strict=True))
            filled.append((into, lent, masked, holes))
            _fill(lent[0], sequences)
    except BaseException:
        for _, (_, give_back), _, _ in filled:
            give_back()
        raise
    length = wanted[0][1][0][0].length
    for (into, lent, masked, holes), (_, sequences) in zip(filled, wanted, strict=True):
        into.length, into.holes = length, holes
        into.mask = lent[0].visible if masked else None
        into.go_on_in(len(sequences), lent)


def _empty(cache: KVCache) -> None:
    """It has no sequences any more, and its slots go back to the pool."""
    cache.select(lambda tensor: tensor.new_empty(0, *tensor.shape[1:]))


def _fill(slots: Slots, sequences: Iterable[tuple[KVCache, int]]) -> None:
    assert isinstance(slots.heads, StoredHeads)
    slots.visible.fill_(1)
    begin = 0
    for cache, part in groupby(sequences, key=lambda each: each[0]):
        rows, length = torch.tensor([row for _, row in part], device=cache.device), cache.length
        at, begin = slice(begin, begin + len(rows)), begin + len(rows)
        assert isinstance(cache.heads, StoredHeads)

        for mine, theirs in zip(slots.heads.tensors, cache.heads.tensors, strict=True):
            mine[at, :, :length] = theirs[rows, :, :length]
        if cache.first is not None:
            slots.first[at] = cache.first[rows]
        for table, given in ((slots.positions, cache.positions), (slots.visible, cache.mask)):
            if given is not None:
                table[at, :length] = given[rows, :length]
