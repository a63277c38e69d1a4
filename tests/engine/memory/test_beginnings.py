"""A cache that is reordered in place has the contents of one that is reordered as a whole."""

from typing import Any

import pytest
import torch
from helpers.models.small_models import small_model
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.engine.memory import beginnings
from labkit.engine.memory.heads import StoredHeads
from labkit.engine.memory.kv_cache import KVCache
from labkit.kernels.build import any_library
from labkit.models.policies import model_config_of

SEQUENCES = 4
orders = st.lists(st.integers(0, SEQUENCES - 1), min_size=SEQUENCES, max_size=SEQUENCES)
acts = st.one_of(orders, st.integers(1, 3), st.just("crop"), st.just("repeat"))


@pytest.fixture(autouse=True)
def library() -> None:
    any_library()


def filled(cache: KVCache, tokens: int, generator: torch.Generator) -> None:
    """Adds tokens with random keys and values, as a step does."""
    start = cache.length
    cache.place(cache.batch_size or SEQUENCES, tokens)
    assert isinstance(cache.heads, StoredHeads)
    for tensor in cache.heads.tensors:
        new = tensor[:, :, start : start + tokens]
        new.copy_(torch.randint(-100, 100, new.shape, generator=generator))
    cache.length = start + tokens


def contents(cache: KVCache) -> list[torch.Tensor]:
    assert isinstance(cache.heads, StoredHeads)
    return [tensor[:, :, : cache.length] for tensor in cache.heads.tensors]


@given(st.lists(acts, min_size=1, max_size=8), st.sampled_from([None, torch.int8]))
@settings(deadline=None, max_examples=60)
def test_any_orders_give_what_whole_copies_give(
    acts: list[list[int] | int | str], kv_dtype: torch.dtype | None
) -> None:
    config = model_config_of(small_model("llama").config)
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    caches = [KVCache(config, torch.bfloat16, kv_dtype=kv_dtype) for _ in generators]
    for act in (5, *acts):
        for whole, (cache, generator) in enumerate(zip(caches, generators, strict=True)):
            if isinstance(act, int):
                filled(cache, act, generator)
            elif act == "crop":
                cache.crop(-min(2, cache.length))
            elif act == "repeat":
                cache.batch_select_indices(torch.tensor([1]))
                cache.batch_repeat_interleave(SEQUENCES)
            elif whole:
                cache.batch_select_indices(torch.tensor(act))
            else:
                cache.reorder_cache(torch.tensor(act))
    for mine, expected in zip(contents(caches[0]), contents(caches[1]), strict=True):
        assert torch.equal(mine, expected)
    positions = [cache.positions for cache in caches if cache.positions is not None]
    assert torch.equal(*positions)


def test_only_what_differs_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy_slots = beginnings.copy_slots

    def counted(caches: Any, copies: list[beginnings.SlotCopy], end: int, **options: int) -> None:
        copied.append(sum(end - copy.begin for copy in copies if copy.to != copy.source))
        copy_slots(caches, copies, end, **options)

    monkeypatch.setattr(beginnings, "copy_slots", counted)
    cache, generator = KVCache(model_config_of(small_model("llama").config), torch.float32), torch.Generator()
    filled(cache, 50, generator)
    cache.reorder_cache(torch.tensor([0, 0, 0, 0]))
    for _ in range(3):
        filled(cache, 1, generator)
        cache.reorder_cache(torch.tensor([1, 1, 0, 2]))
    assert copied[0] == 3 * 50
    assert max(copied[1:]) <= 4 * 3
