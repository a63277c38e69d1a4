"""Sequences leave a cache on a GPU, or caches there regroup their sequences; each one continues as if it had been
alone.

Runs in Triton's interpreter, or on a GPU with the graphs that were captured before.
"""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.kernels.gpus import INTERPRETED, ON_GPU
from helpers.models.engines import greedy_steps, prompt, result, shallow
from helpers.sweeps import sweep, swept
from torch import Tensor

import labkit
from labkit.engine.hf.causal_lm import FusedCausalLM
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.regroup import drop_rows, regroup_rows, rows_left
from labkit.engine.memory.regroup_slots import gather_rows
from labkit.engine.memory.slots import SlotPool

NAMES = ("gpt2", "bloom", "mistral")  # learned positions; ALiBi; rotary embeddings and windows
ROWS, LONG, STEPS = 5, 6, 2
IDS = prompt(ROWS, LONG)
MASK = torch.ones_like(IDS)
MASK[1, :3], MASK[2, 4], MASK[4, :5] = 0, 0, 0  # padding, a hole, and a single visible token
EVERYWHERE = [
    pytest.param("interpreted", marks=INTERPRETED),
    pytest.param("gpu", marks=ON_GPU),
]
everywhere = pytest.mark.parametrize("device", EVERYWHERE)


@cache
def model_of(name: str, **options: Any) -> FusedCausalLM:
    return labkit.init_inference(shallow(name, 1), impl="triton", **options).module


def pool_of(model: FusedCausalLM) -> SlotPool:
    pool = model.new_cache().pool
    assert pool is not None
    return pool


def begun(model: FusedCausalLM, rows: list[int], capacity: int = 16) -> tuple[KVCache, Tensor]:
    """Cache of some texts, and their next tokens."""
    cache = model.new_cache(capacity)
    return cache, result(model, IDS[rows], cache, attention_mask=MASK[rows], greedy=True)


def continued(model: FusedCausalLM, cache: KVCache, tokens: Tensor, steps: int = STEPS) -> Tensor:
    return greedy_steps(model, cache, tokens, steps)


@cache
def alone(name: str) -> Tensor:
    """Tokens of one batch of all texts."""
    model = model_of(name)
    return continued(model, *begun(model, list(range(ROWS))))


@pytest.mark.parametrize("ended", swept({"0": [0], "12": [1, 2], "0134": [0, 1, 3, 4]}, []))
@pytest.mark.parametrize("name", swept(NAMES, ["bloom"]))
@everywhere
def test_the_sequences_that_stay_go_on_in_their_slots(device: str, name: str, ended: list[int]) -> None:
    """After the prompt, and after a step with all sequences; nothing is captured again."""
    model, remaining = model_of(name), rows_left(ROWS, ended)
    for steps in (0, 1):
        cache, tokens = begun(model, list(range(ROWS)))
        texts = continued(model, cache, tokens, steps)
        slots, recorded = cache.slots, len(cache.slots.recordings)
        drop_rows(cache, ended)
        following = continued(model, cache, texts[remaining, -1:], STEPS - steps)
        assert torch.equal(torch.cat((texts[remaining, :-1], following), dim=1), alone(name)[remaining])
        assert cache.slots is slots
        assert len(slots.recordings) == (recorded or 1)


@sweep
@pytest.mark.parametrize("step", [False, True], ids=["", "after a step"])
@pytest.mark.parametrize("cuts", swept({"15": (0, 1, 5), "235": (0, 2, 3, 5)}, ["235"]))
@pytest.mark.parametrize("name", swept(NAMES, ["bloom"]))
@everywhere
def test_caches_that_become_one_go_on_together(device: str, name: str, cuts: tuple[int, ...], step: bool) -> None:
    """With padding in all, in some, and in none, and with unequal room. Freed slots are kept only for their graphs."""
    model = model_of(name)
    parts = [begun(model, list(range(*ends)), 16 + 150 * number) for number, ends in enumerate(pairwise(cuts))]
    caches = [cache for cache, _ in parts]
    texts = torch.cat([continued(model, *part, int(step)) for part in parts])
    lent = [cache.slots for cache in caches]
    regroup_rows(caches, caches, [ROWS] + [0] * (len(caches) - 1))
    assert not any(cache.batch_size for cache in caches[1:])
    assert all((slots in pool_of(model).free) == bool(slots.recordings) for slots in lent)
    assert caches[0].slots not in lent
    following = continued(model, caches[0], texts[:, -1:], STEPS - step)
    assert torch.equal(torch.cat((texts[:, :-1], following), dim=1), alone(name))


@pytest.mark.parametrize("sizes", swept({"023": (0, 2, 3), "221": (2, 2, 1), "500": (5, 0, 0)}, []))
@pytest.mark.parametrize("name", swept(NAMES, ["bloom"]))
@everywhere
def test_sequences_that_are_divided_anew_go_on(device: str, name: str, sizes: tuple[int, ...]) -> None:
    """Regrouped and back, with a step in between, and with a cache that is empty at first."""
    model = model_of(name)
    (first, first_tokens), (last, last_tokens) = begun(model, [0, 1, 2]), begun(model, [3, 4])
    caches, texts = [first, model.new_cache(), last], torch.cat((first_tokens, last_tokens))
    regroup_rows([first, last], caches, sizes)
    for back in (False, True):
        if back:
            regroup_rows([cache for cache in caches if cache.batch_size], caches, (3, 0, 2))
        filled = [cache for cache in caches if cache.batch_size]
        parts = texts[:, -1:].split([cache.batch_size for cache in filled])
        following = torch.cat([continued(model, *part, 1) for part in zip(filled, parts, strict=True)])
        texts = torch.cat((texts[:, :-1], following), dim=1)
    assert torch.equal(texts, alone(name))
    assert [cache.batch_size for cache in caches] == [3, 0, 2]


@sweep
@everywhere
def test_a_cache_whose_sequences_have_all_ended_takes_others(device: str) -> None:
    model = model_of("gpt2")
    (first, _), (last, last_tokens) = begun(model, [0, 1, 2]), begun(model, [3, 4])
    drop_rows(first, [0, 1, 2])
    assert first.batch_size == 0
    regroup_rows([last], [first, last], [1, 1])
    texts = torch.cat((continued(model, first, last_tokens[:1]), continued(model, last, last_tokens[1:])))
    assert torch.equal(texts, alone("gpt2")[3:])


@sweep
@everywhere
def test_a_cache_can_go_on_with_some_sequences_of_others(device: str) -> None:
    model = model_of("bloom")
    (first, first_tokens), (last, last_tokens) = begun(model, [0, 1, 2]), begun(model, [3, 4])
    new = model.new_cache()
    gather_rows([(new, [(last, 1), (first, 2), (first, 0)])])
    assert torch.equal(
        continued(model, new, torch.cat((last_tokens[1:], first_tokens[[2, 0]]))), alone("bloom")[[4, 2, 0]]
    )
    assert torch.equal(continued(model, first, first_tokens), alone("bloom")[:3])


@sweep
@everywhere
def test_int8_keys_and_values_move_with_their_scales(device: str) -> None:
    model = model_of("llama", kv_dtype=torch.int8)
    expected = continued(model, *begun(model, list(range(ROWS))))
    parts = [begun(model, rows) for rows in ([0, 1], [2, 3, 4])]
    caches = [cache for cache, _ in parts]
    regroup_rows(caches, caches, [ROWS, 0])
    drop_rows(parts[0][0], [1])
    tokens = torch.cat([tokens for _, tokens in parts])
    remaining = rows_left(ROWS, [1])
    assert torch.equal(continued(model, parts[0][0], tokens[remaining]), expected[remaining])


@everywhere
def test_slots_that_cannot_be_filled_go_back(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gpt2")
    caches = [begun(model, rows)[0] for rows in ([0, 1], [2, 3])]
    lent, free = [cache.slots for cache in caches], len(pool_of(model).free)
    monkeypatch.setattr(caches[1], "first", torch.zeros(1, dtype=torch.int32))  # too short, and not on the GPU
    with pytest.raises(RuntimeError if device == "gpu" else IndexError):
        regroup_rows(caches, caches, [4, 0])
    assert [cache.slots for cache in caches] == lent
    assert len(pool_of(model).free) >= free
