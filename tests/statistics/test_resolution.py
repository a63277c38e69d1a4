"""The resolution of a machine: from the scatter of an engine against itself to the smallest difference that counts."""

import numpy as np
import pytest
from scipy import stats

from labkit.statistics import LARGEST_SAME, Verdict
from labkit.statistics.resolution import MINUTE_S, Resolution, TellsApart, resolution_of
from labkit.statistics.sequential import EPOCHS, EPOCHS_IN_PLACE, interval_of, more_rounds, planned_ratio

EPOCH_S = 3.0


def epochs(scatter: float, count: int, *, bias: float = 0.0, machines: int = 1) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(5).normal(bias, scatter, (machines, count))


def test_a_known_scatter_gives_the_known_figure() -> None:
    """20 epochs of a minute, a scatter of 2 %: half of Student's interval is 0.94 %."""
    expected = np.expm1(stats.t.ppf(0.975, 19) * 0.02 / np.sqrt(20))
    told = [resolution_of(logs, EPOCH_S).after(MINUTE_S).difference for logs in epochs(0.02, 20, machines=400)]
    assert np.median(told) == pytest.approx(expected, rel=0.05)
    assert expected == pytest.approx(0.0094, rel=0.01)


def test_it_is_the_error_of_a_comparison_of_a_minute() -> None:
    """The ratio of equal sides lies within the resolution in 95 % of the comparisons, and FASTER never occurs."""
    resolution = Resolution(scatter=0.03, bias=0.0, epoch_s=EPOCH_S)
    logs = epochs(0.03, 20, machines=2000)
    difference = resolution.after(MINUTE_S).difference
    assert np.mean(np.abs(logs.mean(axis=1)) < np.log1p(difference)) == pytest.approx(0.95, abs=0.02)
    _, low, _ = interval_of(logs, 0.05)
    assert np.mean(low > np.log1p(EPOCHS.noise)) < np.mean(low > 0)
    assert np.mean(low > np.log1p(EPOCHS.with_floor(difference).noise)) == 0


def test_more_time_tells_more_apart_until_the_bias_is_left() -> None:
    resolution = resolution_of(epochs(0.02, 20)[0], EPOCH_S)
    assert resolution.bias == 0
    minute, ten = (resolution.after(seconds).difference for seconds in (MINUTE_S, 10 * MINUTE_S))
    assert ten == pytest.approx(minute / np.sqrt(10), rel=0.1)
    biased = resolution_of(epochs(0.005, 20, bias=-0.04)[0], EPOCH_S)
    assert biased.bias == pytest.approx(0.04, abs=0.004)
    assert biased.after(MINUTE_S).difference == biased.after(1000 * MINUTE_S).difference == np.expm1(biased.bias)


def test_long_epochs_are_few_and_tell_little_apart() -> None:
    short, long = (Resolution(0.02, 0.0, epoch_s).after(MINUTE_S).difference for epoch_s in (3.0, 20.0))
    assert long == pytest.approx(np.expm1(stats.t.ppf(0.975, 2) * 0.02 / np.sqrt(3)))
    assert long > 5 * short
    assert Resolution(0.02, 0.0, 500.0).after(MINUTE_S).difference == long  # three epochs are measured in any case


def test_no_difference_below_the_floor_is_claimed() -> None:
    """A few epochs that agree by chance have an interval beyond 1.01, which is less than the machine tells apart."""
    logs = np.log([1.018, 1.02, 1.019, 1.021])
    assert planned_ratio(logs, EPOCHS).verdict is Verdict.FASTER
    assert planned_ratio(-logs, EPOCHS).verdict is Verdict.SLOWER
    floored = EPOCHS.with_floor(0.025)
    assert planned_ratio(logs, floored).verdict is Verdict.SAME
    assert planned_ratio(-logs, floored).verdict is Verdict.SAME
    assert planned_ratio(2 * logs, floored).verdict is Verdict.FASTER


@pytest.mark.parametrize("rule", [EPOCHS, EPOCHS_IN_PLACE])
def test_a_floor_changes_a_rule_only_where_it_is_higher(rule: type) -> None:
    assert rule.with_floor(0.005) == rule  # type: ignore[attr-defined]
    higher = rule.with_floor(0.04)  # type: ignore[attr-defined]
    assert (higher.noise, higher.same) == (0.04, max(rule.same, 0.04))  # type: ignore[attr-defined]
    highest = rule.with_floor(0.2)  # type: ignore[attr-defined]
    assert (highest.noise, highest.same) == (0.2, LARGEST_SAME)


def test_between_same_and_a_high_floor_no_number_of_epochs_decides() -> None:
    ratio = planned_ratio(np.log([1.08, 1.1, 1.12]), EPOCHS.with_floor(0.2))
    assert ratio.verdict is Verdict.UNDECIDED
    more = more_rounds(ratio, 3, EPOCHS.with_floor(0.2))
    assert more is not None
    assert more > 1000


def test_it_is_said_in_words() -> None:
    assert TellsApart(0.0213, 60).sentence == (
        "this machine tells 2.1% apart in 60 s, so smaller differences count as none"
    )
