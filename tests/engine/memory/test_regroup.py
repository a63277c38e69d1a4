"""Sequences leave a cache, or caches regroup their sequences; each sequence continues as if it had been alone from the
start.
"""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.engines import fused, greedy_steps, prompt, result, vanilla
from helpers.models.offloaded import descriptors, kv_on_disk, kv_stream_of
from helpers.sweeps import crossed
from torch import Tensor

from labkit.engine.hf.causal_lm import FusedCausalLM
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.regroup import (
    EndedRows,
    cost_of_leaving,
    drop_rows,
    join_rows,
    regroup_rows,
    rows_left,
    share_memory,
)

NAMES = ("gpt2", "bloom", "llama", "mistral")  # learned positions, ALiBi, rotary embeddings, windows
PLACES = ("memory", "disk")
ENDED: tuple[list[int], ...] = ([1, 2], [0], [5], [0, 3, 5], [0, 1, 2, 3, 4])
CUTS = ((0, 2, 3, 6), (0, 1, 6), (0, 3, 6))
IDS = prompt(6, 8)
MASK = torch.ones_like(IDS)
MASK[1, :3], MASK[2, 4], MASK[5, :6] = 0, 0, 0


def placed(name: str, store: str, folder: Path) -> FusedCausalLM:
    """Model whose caches are in memory or on the disk."""
    return fused(name).module if store == "memory" else kv_on_disk(vanilla(name), folder).module


def begun(model: FusedCausalLM, rows: slice) -> tuple[KVCache, Tensor]:
    """Cache of some texts, and their next tokens."""
    cache = model.new_cache(16)
    return cache, result(model, IDS[rows], cache, attention_mask=MASK[rows], greedy=True)


def continued(model: FusedCausalLM, cache: KVCache, tokens: Tensor, steps: int = 5) -> Tensor:
    return greedy_steps(model, cache, tokens, steps)


def alone(name: str) -> Tensor:
    """Tokens of one batch of all texts."""
    model = fused(name).module
    return continued(model, *begun(model, slice(0, 6)))


@pytest.mark.parametrize(("store", "name", "ended"), crossed(PLACES, NAMES, ENDED))
def test_the_sequences_that_stay_go_on(store: str, name: str, ended: list[int], tmp_path: Path) -> None:
    model = placed(name, store, tmp_path)
    cache, tokens = begun(model, slice(0, 6))
    drop_rows(cache, ended)
    remaining = rows_left(6, ended)
    assert sorted(remaining) == [row for row in range(6) if row not in ended]
    whole = fused(name).module
    assert torch.equal(
        continued(model, cache, tokens[remaining], 40), continued(whole, *begun(whole, slice(0, 6)), 40)[remaining]
    )


@pytest.mark.parametrize(("store", "name", "cuts"), crossed(PLACES, NAMES, CUTS))
def test_caches_that_become_one_go_on_together(store: str, name: str, cuts: tuple[int, ...], tmp_path: Path) -> None:
    """With padding in all caches, in some, and in none. All but the first one are empty afterwards."""
    model = placed(name, store, tmp_path)
    parts: list[Any] = [begun(model, slice(*ends)) for ends in pairwise(cuts)]
    caches = [cache for cache, _ in parts]
    join_rows(caches)
    assert not any(cache.is_initialized for cache in caches[1:])
    assert torch.equal(continued(model, caches[0], torch.cat([tokens for _, tokens in parts])), alone(name))


def test_a_file_that_lacks_sequences_is_shorter_and_the_only_one(tmp_path: Path) -> None:
    model = placed("llama", "disk", tmp_path)
    cache, _ = begun(model, slice(0, 6))
    sizes = []
    for _ in range(2):
        (size,) = {os.fstat(descriptor).st_size for descriptor in descriptors(tmp_path)}
        sizes.append(size)
        drop_rows(cache, [0, 3, 5])
    assert sizes[0] == 2 * sizes[1]


def test_ended_sequences_leave_memory_at_once_and_a_file_when_they_cost_as_much(tmp_path: Path) -> None:
    """Ended sequences leave a file when reading them in vain has cost as much as removing them, apart from one step."""
    for store in PLACES:
        model = placed("llama", store, tmp_path)
        cache, tokens = begun(model, slice(0, 6))
        ended, steps = EndedRows(cache), 0
        leaving = ended.leaving([1, 4])
        while not leaving:
            tokens, steps = continued(model, cache, tokens, 1)[:, 1:], steps + 1
            leaving = ended.leaving([3] if steps == 2 else [])
        cost = cost_of_leaving(cache, len(leaving))
        if store == "memory":
            assert (leaving, steps, cost) == ([1, 4], 0, 0)
        else:
            sequence_bytes = kv_stream_of(cache).file.shape.pass_bytes(1, cache.length)  # in a step
            assert (leaving, steps, cost) == ([1, 3, 4], 4, 9 * sequence_bytes)
            assert 2 * 2 + 3 * 2 >= cost / sequence_bytes > 2 * 2 + 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [(6, 0, 0), (0, 2, 4), (1, 2, 3), (2, 2, 2)], ids=str)
def test_sequences_that_are_divided_anew_go_on(name: str, sizes: tuple[int, ...]) -> None:
    """One cache is empty at first, and each sequence continues from its own tokens."""
    model = fused(name).module
    parts = [begun(model, slice(0, 4)), (model.new_cache(), torch.empty(0, 1)), begun(model, slice(4, 6))]
    caches, tokens = [cache for cache, _ in parts], torch.cat([parts[0][1], parts[2][1]])
    regroup_rows([caches[0], caches[2]], caches, sizes)
    texts = [
        continued(model, cache, cache_tokens) if len(cache_tokens) else torch.empty(0, 6)
        for cache, cache_tokens in zip(caches, tokens.split(sizes), strict=True)
    ]
    assert torch.equal(torch.cat(texts), alone(name))
    for cache in caches:
        assert cache.batch_size == 0 or cache.length == 13
    assert [cache.batch_size for cache in caches] == list(sizes)


def test_caches_side_by_side_are_divided_anew_where_they_lie() -> None:
    model = fused("llama").module
    caches = [model.new_cache(16) for _ in range(3)]
    share_memory(caches, [3, 2, 1], 8)
    tokens = []
    for cache, part in zip(caches, (slice(0, 3), slice(3, 5), slice(5, 6)), strict=True):
        tokens.append(result(model, IDS[part], cache, attention_mask=MASK[part], greedy=True))
    address = caches[0].layer(0).keys.data_ptr()
    regroup_rows(caches, caches, [0, 6, 0])
    assert caches[1].layer(0).keys.data_ptr() == address
    regroup_rows(caches[1:2], caches, [1, 0, 5])
    assert caches[0].layer(0).keys.data_ptr() == address
    first, *others = torch.cat(tokens).split(1)
    texts = continued(model, caches[0], first), continued(model, caches[2], torch.cat(others))
    assert torch.equal(torch.cat(texts), alone("llama"))
