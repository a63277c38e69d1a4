"""The choice among ways to read weights, on simulated machines; and no way changes a result."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from helpers.models.engines import fused, prompt

from labkit.engine.runners.one_call import OneCallRunner
from labkit.engine.runners.reading_choice import LEAST_ROUNDS, MOST_ROUNDS, ReadingChoice, ReadingChoices
from labkit.engine.runners.step import StepInput
from labkit.kernels.reading import READINGS, USUAL

WAYS = range(5)
STEP_NS = 10e6
Machine = Callable[[int, float], float]  # (way, seconds since the start) -> time of a step, relative to the fastest way


def one_fast(fast: int, slower: float, way: int, _: float) -> float:
    return 1.0 if way == fast else slower


def steps(choice: ReadingChoice, machine: Machine, seconds: float, seed: int, noise: float = 0.05) -> tuple[float, int]:
    """Runs steps for `seconds`. Returns the share of the time that the fastest way would have saved, and the number of
    steps.
    """
    random, elapsed_ns, best_ns, count = np.random.default_rng(seed), 0.0, 0.0, 0
    while elapsed_ns < seconds * 1e9:
        way, mood = choice.next, STEP_NS * (1 + noise * random.exponential())
        cost = machine(way, elapsed_ns / 1e9)
        choice.took(int(mood * cost))
        elapsed_ns, best_ns, count = elapsed_ns + mood * cost, best_ns + mood, count + 1
    return (elapsed_ns - best_ns) / elapsed_ns, count


@pytest.mark.parametrize("fastest", WAYS)
def test_the_fastest_way_serves_after_a_few_rounds(fastest: int) -> None:
    chosen = []
    for seed in range(40):
        choice = ReadingChoice(WAYS)
        steps(choice, partial(one_fast, fastest, 1.15), 2 * LEAST_ROUNDS * len(WAYS) * 0.0125, seed)
        chosen.append(choice.chosen)
    assert chosen.count(fastest) >= 38


@pytest.mark.parametrize("fastest", WAYS)
def test_two_engines_come_to_the_same_way_even_if_the_others_are_little_slower(fastest: int) -> None:
    chosen = []
    for seed in range(40):
        choice = ReadingChoice(WAYS)
        steps(choice, partial(one_fast, fastest, 1.025), MOST_ROUNDS * len(WAYS) * 0.0125, seed)
        chosen.append(choice.chosen)
    assert chosen.count(fastest) >= 36


def test_ways_that_are_equally_fast_rarely_take_turns() -> None:
    """Less than twice a minute. Changes would cost nothing, but a count of changes should describe the machine."""
    choices = [ReadingChoice(WAYS) for _ in range(20)]
    for seed, choice in enumerate(choices):
        steps(choice, lambda way, _: 1.0, 60, seed)
    assert sum(choice.changes for choice in choices) < 2 * len(choices)


def test_looking_costs_less_than_half_a_percent() -> None:
    """Even if the other ways take three times as long. The first choice, which takes a second, is not counted."""
    for slower in (1.15, 1.5, 3.0):
        choice = ReadingChoice(WAYS)
        steps(choice, partial(one_fast, 2, slower), 1.5, seed=0)
        assert choice.chosen == 2
        lost_share, _ = steps(choice, partial(one_fast, 2, slower), 600, seed=1)
        assert lost_share < 0.005


def test_disturbed_steps_start_no_race_of_slow_ways() -> None:
    """As in a comparison, where the first step of each turn of three meets cold caches. A race of slow ways would make
    half a second of it slow.
    """
    choice, random = ReadingChoice(WAYS), np.random.default_rng(0)
    steps(choice, partial(one_fast, 2, 2.0), 1.5, seed=0)
    slow = []
    for number in range(6_000):
        way, cold = choice.next, 1.6 if number % 3 == 0 else 1.0
        slow.append(way != 2)
        choice.took(int(STEP_NS * cold * (1 + 0.05 * random.exponential()) * (1 if way == 2 else 2)))
    assert choice.chosen == 2
    assert max(np.convolve(slow, np.ones(50))) <= 2


def test_another_way_takes_over_soon_after_the_machine_changes() -> None:
    """The memory alternates between its fast and its slow mode."""
    choice = ReadingChoice(WAYS)

    def machine(way: int, second: float) -> float:
        return 1.0 if way == (1 if second % 40 < 20 else 0) else 1.2

    lost_share, _ = steps(choice, machine, 200, seed=0)
    assert lost_share < 0.05
    assert 8 <= choice.changes <= 12


def test_a_kept_way_serves_from_the_first_step_and_each_other_way_is_tried_once() -> None:
    kept: list[int] = []
    choice = ReadingChoice(WAYS, kept=2, keep=kept.append)
    used = []
    for _ in range(120):
        used.append(choice.next)
        choice.took(int(STEP_NS * (1 if choice.next == 2 else 2)))
    assert used[:20] == [2] * 20
    assert sorted(way for way in used if way != 2) == [0, 1, 3, 4]
    assert (choice.chosen, kept) == (2, [])


@pytest.mark.parametrize("fastest", WAYS)
def test_a_kept_way_that_became_slow_is_left_within_two_seconds(fastest: int) -> None:
    kept: list[int] = []
    choice = ReadingChoice(WAYS, kept=(fastest + 1) % len(WAYS), keep=kept.append)
    steps(choice, partial(one_fast, fastest, 1.3), 2, seed=fastest)
    assert choice.chosen == kept[-1] == fastest


def test_every_choice_is_kept() -> None:
    kept: list[int] = []
    choice = ReadingChoice(WAYS, keep=kept.append)
    steps(choice, lambda way, second: 1.0 if way == (1 if second < 20 else 0) else 1.2, 40, seed=0)
    assert kept[0] == 1
    assert kept[-1] == choice.chosen == 0
    assert len(kept) == 1 + choice.changes


def test_one_way_is_never_left() -> None:
    choice = ReadingChoice((3,))
    steps(choice, lambda way, _: 1.0, 10, seed=0)
    assert (choice.next, choice.changes) == (3, 0)


def test_every_number_of_rows_has_its_own_choice_and_prompts_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = ReadingChoices()
    assert str(choices) == ""
    assert choices.of(1, tokens=7).next == USUAL
    assert choices.of(1, 1) is choices.of(1, 1)
    assert choices.of(1, 1) is not choices.of(2, 1)
    assert str(choices) == READINGS[choices.of(2, 1).chosen]
    monkeypatch.setenv("LABKIT_READ", "l2-6k")
    fixed = ReadingChoices()
    assert {READINGS[fixed.of(1, tokens).next] for tokens in (1, 7)} == {"l2-6k"}
    monkeypatch.setenv("LABKIT_READ", "far")
    with pytest.raises(ValueError, match=r"LABKIT_READ is 'far'; expected one of none, l1-2k"):
        ReadingChoices()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_no_way_to_read_changes_a_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """For prompts and decode steps, with one register tile of rows and with several."""
    layer_range = fused("llama", dtype=dtype).fused.runner.layer_range  # type: ignore[union-attr]
    for batch in (1, 14):
        runs = []
        for name in READINGS:
            monkeypatch.setenv("LABKIT_READ", name)
            runner = OneCallRunner(layer_range)
            cache = runner.layer_range.new_cache()
            steps = [StepInput(ids, cache, keep=1) for ids in prompt(batch, 6).split((5, 1), 1)]
            runs.append([runner.begin(step).collect().result for step in steps])
            assert runner.info.reading == name
        for results in runs[1:]:
            for first, second in zip(runs[0], results, strict=True):
                assert first is not None
                assert second is not None
                assert torch.equal(first, second)
