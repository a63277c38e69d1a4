"""Caches in host memory, with a GPU for the kernels, hold the same data as caches in one memory.

The CPU stands in for the GPU: data that is written and read passes through slots, as in a step.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models.engines import vanilla
from torch import Tensor

from labkit.engine.memory.heads_on_host import HeadsOnHost, HostMemory
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.regroup import drop_rows
from labkit.engine.memory.slots import SlotPool
from labkit.kernels.slot_stream.queues import CpuQueues
from labkit.kernels.types import LayerCache
from labkit.models.policies import model_config_of
from labkit.system.errors import RunError, UserError

CPU = torch.device("cpu")
CONFIG = model_config_of(vanilla("llama").config)
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
CHANGES: dict[str, Callable[[KVCache], object]] = {
    "nothing": lambda cache: None,
    "crop": lambda cache: cache.crop(-3),
    "reset": lambda cache: cache.reset(),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "reorder to one": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "select by mask": lambda cache: cache.batch_select_indices(torch.tensor([False, True])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "drop": lambda cache: drop_rows(cache, [0]),
    "grow": lambda cache: cache.reserve(2, 700),
}
pytestmark = pytest.mark.usefixtures("poisoned")


def pool_of(kv_dtype: torch.dtype, slots: int = 3, any_failed: Callable[[bool], bool] | None = None) -> SlotPool:
    return SlotPool(CONFIG, kv_dtype, CPU, HostMemory(slots, any_failed, CPU, CpuQueues(), ranks_here=1))


def cache_in(pool: SlotPool, capacity: int = 0) -> KVCache:
    return KVCache(CONFIG, torch.float32, capacity, pool, pool.dtype, pool.memory)


def parts(layer: LayerCache) -> list[Tensor]:
    return [tensor for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales) if tensor is not None]


def put(cache: KVCache, tokens: int, seed: int, mask: Tensor | None = None) -> None:
    """Adds random keys and values for `tokens` new tokens, determined by `seed`."""
    random, past = torch.Generator().manual_seed(seed), cache.length
    cache.place(cache.batch_size or 2, tokens, mask)
    assert cache.heads is not None
    for layer in cache.heads.layers_in_order(range(past, past + tokens)):
        for part in parts(layer):
            new = part[:, :, past : past + tokens]
            new.copy_(torch.randint(-90, 90, new.shape, generator=random))
    cache.length = past + tokens


def contents(cache: KVCache) -> list[Tensor]:
    """All data that the cache has about its tokens."""
    assert cache.heads is not None
    length, tensors = cache.length, []
    for layer in cache.heads.layers_in_order(range(length, length)):
        tensors += [part[:, :, :length].clone() for part in parts(layer)]
    for table in (cache.positions, cache.mask):
        tensors += [] if table is None else [table[:, :length].clone()]
    assert cache.first is not None
    return [*tensors, cache.first.clone()]


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=["float32", "int8"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_cache_goes_on_as_one_in_one_place(name: str, kv_dtype: torch.dtype) -> None:
    """Cropped, reordered, selected, repeated or grown. The original of a changed copy works too."""
    caches = cache_in(pool_of(kv_dtype)), KVCache(CONFIG, torch.float32, kv_dtype=kv_dtype)
    states = []
    for original in caches:
        put(original, 7, 0, MASK)
        cache = copy.deepcopy(original)
        CHANGES[name](cache)
        put(cache, 2, 1)
        put(cache, 1, 2)
        put(original, 3, 3)
        states.append([cache.batch_size, cache.length, cache.reach, *contents(cache), *contents(original)])
    for host_state, expected in zip(*states, strict=True):
        assert torch.equal(torch.as_tensor(host_state), torch.as_tensor(expected))


def test_a_cache_whose_sequences_have_all_ended_has_no_memory() -> None:
    cache = cache_in(pool_of(torch.float32))
    put(cache, 5, 0)
    drop_rows(cache, [0, 1])
    assert cache.batch_size == 0
    assert isinstance(cache.heads, HeadsOnHost)
    assert cache.heads.pass_bytes(2) == cache.heads._host.bytes == 0


@pytest.mark.parametrize("slots", [2, 3, 9])
def test_caches_take_turns_in_slots_that_are_lent_again(slots: int) -> None:
    pool, alone = pool_of(torch.float32, slots), KVCache(CONFIG, torch.float32)
    caches = [cache_in(pool, capacity=20) for _ in range(2)]
    for seed in range(3):
        for cache in (*caches, alone):
            put(cache, 4 - seed, seed)
    expected, lent = contents(alone), {id(cache.slots) for cache in caches}
    assert all(map(torch.equal, contents(caches[0]), expected))
    del caches, cache
    assert {id(slot) for slot in pool.free} == lent
    reused = cache_in(pool, capacity=20)
    for seed in range(3):
        put(reused, 4 - seed, seed)
    assert all(map(torch.equal, contents(reused), expected))
    assert id(reused.slots) in lent


def test_a_cache_that_lacks_room_on_another_rank_stays_as_it_is() -> None:
    """All ranks are notified; the rank without room has a message of its own."""
    votes: list[bool] = []

    def any_failed(failed: bool) -> bool:
        votes.append(failed)
        return len(votes) == 2

    pool = pool_of(torch.float32, 3, any_failed)
    cache = cache_in(pool)
    put(cache, 5, 0)
    expected = contents(cache)
    with pytest.raises(RunError, match="another rank has no room for its keys and values"):
        cache.reserve(2, 300)
    assert votes == [False, False]
    assert len(pool.free) == 1
    assert cache.capacity < 300
    assert all(map(torch.equal, contents(cache), expected))
    put(cache, 300, 1)
    assert votes == [False] * 3


def test_memory_that_a_gpu_lacks_is_not_missed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change leaves the slots. If no slots are free for the result, the cache works again when some are."""
    pool, alone = pool_of(torch.float32), KVCache(CONFIG, torch.float32)
    cache = cache_in(pool)
    for kv in (cache, alone):
        put(kv, 5, 0)
        kv.batch_repeat_interleave(3)

    def none_left(*sizes: Any) -> None:
        raise UserError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(pool, "_make", none_left)
        with pytest.raises(UserError, match="no memory"):
            put(cache, 1, 1)
    for kv in (cache, alone):
        put(kv, 1, 1)
    assert all(map(torch.equal, contents(cache), contents(alone)))
