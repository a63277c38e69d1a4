"""Memory of caches on a GPU: caches borrow it one after the other, never two at once."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.kernels.gpus import INTERPRETED
from helpers.models.engines import error, greedy, prompt, result, shallow
from helpers.sweeps import sweep
from torch import Tensor

import labkit
from labkit.engine.hf.causal_lm import FusedCausalLM
from labkit.engine.memory import slots as slots_module
from labkit.engine.memory.kv_cache import BLOCK, KVCache
from labkit.engine.memory.slots import BUCKETS, Slots, bucket

SAME = 1e-4  # of the range of the logits, compared with transformers
pytestmark = INTERPRETED


def engine_of(name: str, impl: str = "triton") -> FusedCausalLM:
    """Model of one layer with a pool of its own."""
    return labkit.init_inference(shallow(name, 1), impl=impl).module


def free(model: FusedCausalLM) -> list[Slots]:
    pool = model.new_cache().pool
    assert pool is not None
    return pool.free


def full(name: str, text: Tensor) -> Tensor:
    """Logits of the last token from a single forward pass."""
    with torch.no_grad():
        return shallow(name, 1)(text).logits[:, -1:]


def started(model: FusedCausalLM, text: Tensor, capacity: int = 9) -> KVCache:
    cache = model.new_cache(capacity)
    result(model, text, cache)
    return cache


def test_batches_are_rounded_up_to_few_sizes() -> None:
    assert [bucket(batch) for batch in (1, 2, 3, 4, 5, 8, 9, 16, 17, 40)] == [1, 2, 4, 4, 8, 8, 16, 16, 17, 40]
    assert all(bucket(size) == size for size in BUCKETS)


def test_two_caches_at_once_do_not_disturb_each_other() -> None:
    model, steps = engine_of("gpt2"), prompt(2, 2, seed=9)
    texts = [prompt(1, 5), prompt(1, 5, seed=1)]
    caches = [started(model, text) for text in texts]
    assert caches[0].slots is not caches[1].slots
    for step_index in range(2):
        for row, cache in enumerate(caches):
            step = steps[row, step_index, None, None]
            texts[row] = torch.cat((texts[row], step), dim=1)
            assert error(result(model, step, cache, follows=True), full("gpt2", texts[row])) <= SAME


def test_what_a_cache_leaves_is_lent_again_with_what_was_recorded_on_it() -> None:
    model = engine_of("gpt2")
    expected = greedy(shallow("gpt2", 1), prompt(1, 4), 2)
    assert torch.equal(greedy(model, prompt(1, 4), 2), expected)
    (slots,) = free(model)
    (recording,) = slots.recordings.values()
    assert torch.equal(greedy(model, prompt(1, 4), 2), expected)
    assert free(model) == [slots]
    assert list(slots.recordings.values()) == [recording]


def test_memory_of_another_size_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "BLOCK", 1)
    model = engine_of("gpt2")
    sizes = ((1, 40), (1, 9), (2, 9))
    caches = [started(model, prompt(batch, 4), capacity) for batch, capacity in sizes]
    assert [cache.slots.shape for cache in caches] == list(sizes)
    lent = [cache.slots for cache in caches]
    del caches
    assert set(free(model)) == set(lent)
    assert started(model, prompt(2, 4), 6).slots is lent[2]
    assert started(model, prompt(1, 4), 6).slots is lent[1]
    assert started(model, prompt(1, 4), 19).slots not in lent


def test_a_slightly_longer_text_finds_memory_again() -> None:
    model = engine_of("gpt2")
    slots = started(model, prompt(1, 4), 6).slots
    assert slots.shape == (1, slots_module.BLOCK)
    assert started(model, prompt(1, 4), 7).slots is slots


@sweep
def test_holes_in_one_cache_after_another_are_one_recording() -> None:
    """A recording, or the graph on a GPU, reads the mask at the same address."""
    model = engine_of("bloom")
    for hole in (1, 2):
        ids, mask = prompt(3, 4), torch.ones(3, 4, dtype=torch.int64)
        mask[0, hole] = mask[1, 0] = 0
        actual = greedy(model, ids, 3, attention_mask=mask)
        assert torch.equal(actual, greedy(shallow("bloom", 1), ids, 3, attention_mask=mask))
    (slots,) = free(model)
    assert len(slots.recordings) == 1


@sweep
def test_a_cache_grows_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets other slots, more of them, in several shares."""
    monkeypatch.setattr(slots_module, "BLOCK", 1)
    model, text, steps = engine_of("llama"), prompt(1, 4), prompt(1, 2, seed=1)
    cache = started(model, text, 4)
    first_capacity = cache.capacity
    for index in range(2):
        text = torch.cat((text, steps[:, index, None]), dim=1)
        assert error(result(model, steps[:, index, None], cache, follows=True), full("llama", text)) <= SAME
    assert (first_capacity, cache.capacity) == (4, 4 + BLOCK)
    assert len(free(model)) == 1


@sweep
def test_a_copied_cache_goes_on_alone() -> None:
    """transformers uses such copies for prompts with the same beginning."""
    for model in (engine_of("gpt2", "cpp"), engine_of("gpt2")):
        text, steps = prompt(1, 4), prompt(2, 1, seed=1)
        cache = started(model, text)
        twin = copy.deepcopy(cache)
        for kv, step in ((cache, steps[:1]), (twin, steps[1:])):
            actual = result(model, step, kv, follows=True)
            assert error(actual, full("gpt2", torch.cat((text, step), dim=1))) <= SAME


@sweep
def test_a_cropped_cache_goes_on_from_there() -> None:
    """Even if another prompt has filled it up to its old length."""
    model, text, step = engine_of("gpt2"), prompt(1, 6), prompt(1, 1, seed=1)
    cache = started(model, text)
    for keep, added in ((5, 0), (3, 0), (2, 2)):
        cache.crop(keep)
        whole = torch.cat((text[:, :keep], prompt(1, added, seed=2)), dim=1)
        if added:
            result(model, whole[:, keep:], cache, keep=1)
        actual = result(model, step, cache, follows=True)
        assert error(actual, full("gpt2", torch.cat((whole, step), dim=1))) <= SAME


@sweep
def test_sequences_that_nobody_asked_for_stay_within_the_tables() -> None:
    """Three sequences leave a fourth row free, where another text was before, at far positions."""
    model = engine_of("gpt2")
    far = torch.arange(185, 191)[None]
    result(model, prompt(4, 6), model.new_cache(8), position_ids=far)
    cache = model.new_cache(8)
    result(model, prompt(3, 6), cache)
    result(model, prompt(3, 1), cache, greedy=True, follows=True)
    assert cache.slots.shape[0] == 4
    assert int(cache.slots.next_positions.max()) <= cache.reach == 7


@sweep
def test_memory_made_in_inference_mode_can_be_written_outside() -> None:
    model, expected = engine_of("gpt2"), greedy(shallow("gpt2", 1), prompt(1, 3), 2)
    with torch.inference_mode():
        assert torch.equal(greedy(model, prompt(1, 3), 2), expected)
    assert torch.equal(greedy(model, prompt(1, 3), 2), expected)


@sweep
def test_callers_in_several_threads_may_share_an_engine() -> None:
    model, texts = engine_of("gpt2"), [prompt(1, 4, seed) for seed in range(3)]
    expected = [greedy(shallow("gpt2", 1), text, 2) for text in texts]
    with ThreadPoolExecutor(len(texts)) as threads:
        texts_of_threads = list(threads.map(lambda text: greedy(model, text, 2), texts))
    assert all(
        torch.equal(actual, expected_text) for actual, expected_text in zip(texts_of_threads, expected, strict=True)
    )


def test_a_cache_on_the_cpu_borrows_nothing() -> None:
    with pytest.raises(RuntimeError, match="a cache on the CPU borrows no slots"):
        _ = engine_of("gpt2", "cpp").new_cache().slots
