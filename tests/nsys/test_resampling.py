"""Intervals over steps contain the true mean about as often as they claim, also if neighbours are correlated."""

import numpy as np
import pytest

from labkit.nsys.analysis import resampling
from labkit.nsys.analysis.resampling import block_length, resampled
from labkit.nsys.arrays import Floats


@pytest.fixture(autouse=True)
def _fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resampling, "RESAMPLES", 499)


def difference(baseline: Floats, candidate: Floats) -> Floats:
    return np.stack([baseline[0] - candidate[0]])


def steps(random: np.random.Generator, count: int, correlation: float) -> Floats:
    """Times of steps around 10, each correlated with the one before it by `correlation`."""
    noise = random.standard_normal(count)
    for index in range(1, count):
        noise[index] = correlation * noise[index - 1] + np.sqrt(1 - correlation**2) * noise[index]
    return (10 + noise)[:, None]


@pytest.mark.parametrize(
    ("count", "correlation", "least"), [(5, 0.0, 0.9), (12, 0.0, 0.9), (30, 0.3, 0.88), (100, 0.5, 0.85)]
)
def test_the_interval_holds_the_true_difference(count: int, correlation: float, least: float) -> None:
    random = np.random.default_rng(8)
    hits = 0
    for _ in range(120):
        low, high = resampled(
            steps(random, count, correlation) + 2, steps(random, count + 3, correlation), difference
        ).interval()
        hits += low[0] <= 2 <= high[0]
    assert least <= hits / 120


def test_blocks_widen_the_interval_of_steps_that_are_alike() -> None:
    random = np.random.default_rng(1)
    rows = np.repeat(10 + random.standard_normal((16, 1)), 4, axis=0)  # 64 steps in runs of four equal ones
    shuffled = random.permutation(rows)
    widths = []
    for times in (rows, shuffled):
        low, high = resampled(times, times, difference).interval()
        widths.append(high[0] - low[0])
    assert widths[0] > 1.5 * widths[1]


def test_more_confidence_is_a_wider_interval() -> None:
    random = np.random.default_rng(2)
    result = resampled(steps(random, 20, 0.0), steps(random, 20, 0.0), difference)
    (low, high), (lower, higher) = result.interval(0.9), result.interval(0.99)
    assert lower[0] < low[0] < result.estimate[0] < high[0] < higher[0]


def test_the_last_block_may_be_short_and_means_stay_those_of_steps() -> None:
    rows = np.arange(11.0)[:, None]
    assert block_length(11) == 2
    result = resampled(rows, rows[:1].repeat(4, axis=0), difference)
    assert result.estimate[0] == 5
    assert result.distribution.mean() == pytest.approx(5, abs=0.3)


def test_one_step_has_no_interval() -> None:
    result = resampled(np.ones((1, 1)), np.ones((9, 1)), difference)
    assert result.estimate[0] == 0
    assert np.isnan(result.interval()).all()


def test_the_same_steps_give_the_same_interval() -> None:
    random = np.random.default_rng(3)
    rows = steps(random, 12, 0.0), steps(random, 9, 0.0)
    assert np.array_equal(resampled(*rows, difference).interval(), resampled(*rows, difference).interval())
