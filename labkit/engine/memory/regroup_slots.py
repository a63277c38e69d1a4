"""Removes sequences from caches on a GPU, and divides the sequences of caches anew there. The memory is lent together
with the CUDA graphs recorded on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

import torch

from labkit.engine.memory.heads import StoredHeads
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.slots import Lent, Slots


def keep_rows(cache: KVCache, moves: Sequence[tuple[int, int]], count: int) -> None:
    """Moves remaining sequences into the rows of ended ones, (to, from), and keeps the first `count` rows.

    The slots stay: another number of rows would need its own graph, recorded in the middle of the texts. The unused
    rows are still computed, but all their tokens are hidden.
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
    cache.continue_in(count)


def regroup_slots(sources: Sequence[KVCache], caches: Sequence[KVCache], sizes: Sequence[int]) -> None:
    """Divides the sequences of the caches `sources`, which have the same length, anew among `caches`, in their order:
    `sizes[i]` sequences go to `caches[i]`. Earlier contents of `caches` that are not in `sources` are lost. Keys and
    values are in memory twice for a moment.
    """
    sequences = [(cache, row) for cache in sources for row in range(cache.batch_size)]
    assert sum(sizes) == len(sequences)
    parts = [sequences[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    gather_rows([(cache, part) for cache, part in zip(caches, parts, strict=True) if part])
    for cache, size in zip(caches, sizes, strict=True):
        if not size and cache.is_initialized:
            _empty(cache)
    pool = sources[0].pool
    assert pool is not None
    pool.drop_unrecorded()  # memory of a prompt, which has no graphs


def gather_rows(plan: Sequence[tuple[KVCache, Sequence[tuple[KVCache, int]]]]) -> None:
    """Fills each cache with sequences of other caches: `plan` lists (cache, [(source, row)]). All sources have the
    same length. A cache may also be a source: no slots return to the pool before all sequences are copied.
    """
    filled: list[tuple[KVCache, Lent, bool, bool]] = []
    try:
        for into, sequences in plan:
            sources = {id(cache): cache for cache, _ in sequences}.values()
            assert into.pool is not None
            lent = into.pool.take(into, len(sequences), max(cache.capacity for cache in sources))
            masked, holes = (
                any(flags) for flags in zip(*((s.mask is not None, s.holes) for s in sources), strict=True)
            )
            filled.append((into, lent, masked, holes))
            _fill(lent.slots, sequences)
    except BaseException:
        for _, lent, _, _ in filled:
            lent.give_back()
        raise
    length = plan[0][1][0][0].length
    for (into, lent, masked, holes), (_, sequences) in zip(filled, plan, strict=True):
        into.length, into.holes = length, holes
        into.mask = lent.slots.visible if masked else None
        into.continue_in(len(sequences), lent)


def _empty(cache: KVCache) -> None:
    """Removes all sequences of a cache, and returns its slots to the pool."""
    cache.select(lambda tensor: tensor.new_empty(0, *tensor.shape[1:]))


def _fill(slots: Slots, sequences: Iterable[tuple[KVCache, int]]) -> None:
    assert isinstance(slots.heads, StoredHeads)
    slots.visible.fill_(1)
    begin = 0
    for cache, part in groupby(sequences, key=lambda sequence: sequence[0]):
        rows, length = torch.tensor([row for _, row in part], device=cache.device), cache.length
        at, begin = slice(begin, begin + len(rows)), begin + len(rows)
        assert isinstance(cache.heads, StoredHeads)

        for mine, theirs in zip(slots.heads.tensors, cache.heads.tensors, strict=True):
            mine[at, :, :length] = theirs[rows, :, :length]
        if cache.first is not None:
            slots.first[at] = cache.first[rows]
        for table, source in ((slots.positions, cache.positions), (slots.visible, cache.mask)):
            if source is not None:
                table[at, :length] = source[rows, :length]
