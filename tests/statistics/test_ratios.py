"""Intervals, noise floors and verdicts claim no more than the samples allow."""

import numpy as np
import pytest
from scipy import stats

from labkit.statistics import Ratio, Verdict, first_is_slow, noise_floor, outliers, ratio, remarks, summarise


def shared_machine(rng: np.random.Generator, rounds: int, speedup: float = 1.0) -> tuple[list[float], list[float]]:
    """Samples of two sides on a machine that switches between two speeds every few rounds; each run has 3 % noise."""
    mood = np.where(rng.random(rounds).cumsum() % 2 < 1, 1.0, 1.5)
    noise = np.exp(0.03 * rng.standard_normal((2, rounds)))
    return list(30 * mood * noise[0]), list(30 / speedup * mood * noise[1])


@pytest.mark.parametrize("rounds", [2, 3, 5, 7, 12])
def test_a_side_is_rarely_faster_than_itself(rounds: int) -> None:
    rng = np.random.default_rng(5)
    verdicts = [ratio(*shared_machine(rng, rounds)).verdict for _ in range(150)]
    claims = sum(verdict in (Verdict.FASTER, Verdict.SLOWER) for verdict in verdicts)
    assert claims <= 0.05 * len(verdicts)


@pytest.mark.parametrize("rounds", [3, 7])
def test_a_large_speedup_is_seen_and_its_mirror_image_too(rounds: int) -> None:
    rng = np.random.default_rng(6)
    for _ in range(50):
        slow, fast = shared_machine(rng, rounds, speedup=2.4)
        assert ratio(slow, fast).verdict is Verdict.FASTER
        assert ratio(fast, slow).verdict is Verdict.SLOWER


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    intervals = [ratio(*shared_machine(rng, 7, speedup=1.7)) for _ in range(200)]
    coverage = np.mean([interval.low <= 1.7 <= interval.high for interval in intervals])
    assert coverage >= 0.9


def test_equal_quiet_sides_are_the_same() -> None:
    steady = [10.0, 10.01, 10.02, 10.01, 10.0, 10.02]
    assert ratio(steady, steady).verdict is Verdict.SAME


def test_an_interval_across_the_noise_is_undecided() -> None:
    assert Ratio(value=1.05, low=0.98, high=1.12, noise=0.03).verdict is Verdict.UNDECIDED


def test_noise_that_hides_everything_does_not_make_sides_the_same() -> None:
    assert Ratio(value=6.7, low=4.0, high=20.5, noise=25.0).verdict is Verdict.UNDECIDED


def test_rounds_stay_together() -> None:
    """A machine that is ten times slower every other round moves both sides, so it hardly moves their ratio."""
    mood = np.array([1.0, 10.0] * 4)
    wobble = np.linspace(0.99, 1.01, 8)
    speedup = ratio(list(20 * mood * wobble), list(10 * mood))
    assert 1.9 < speedup.low <= speedup.value <= speedup.high < 2.1


def test_ratio_needs_two_rounds_of_both() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        ratio([1.0], [1.0])
    with pytest.raises(ValueError, match="the same number of each"):
        ratio([1.0, 2.0], [1.0, 2.0, 3.0])


def test_noise_floor_is_zero_without_noise_and_grows_with_it() -> None:
    assert noise_floor([5.0] * 6) == 0
    assert noise_floor([5.0, 5.5, 5.0, 5.5]) == pytest.approx(0.1)
    assert noise_floor([5.0] * 40) == 0


def test_outliers_are_told_and_kept() -> None:
    samples = [*np.linspace(9.9, 10.1, 40), 25.0]
    assert list(np.nonzero(outliers(samples))[0]) == [40]
    summary = summarise(samples)
    assert summary.n == 41
    assert summary.mean > 10.3
    assert "1 of 41 samples are outliers" in remarks("side", samples)[0]


def test_p95_is_a_bound_from_59_samples_on() -> None:
    """The largest of n samples lies above the 95th percentile with probability 1 - 0.95 ** n."""
    few, enough = summarise([1.0] * 58), summarise([1.0] * 59)
    assert not few.enough_for_p95
    assert "n too small" in few.p95_text
    assert enough.enough_for_p95
    assert stats.binom.cdf(58, 59, 0.95) >= 0.95 > stats.binom.cdf(57, 58, 0.95)


def test_a_wide_spread_is_remarked() -> None:
    assert "interquartile" in remarks("side", [8.0, 9.0, 10.0, 11.0, 12.0])[0]
    assert remarks("side", [10.0, 10.1, 10.2]) == []


def test_a_slow_first_round_is_noticed() -> None:
    assert first_is_slow([15.0, 10.0, 11.0])
    assert not first_is_slow([11.0, 10.0, 11.0])


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1.0, 1.25, "1.10x [1.00, 1.25]"),
        (0.0004, 102041078.39, "1.10x [<0.01, >1000]"),
        (0.01, 1000.0, "1.10x [0.01, 1000.00]"),
    ],
)
def test_an_interval_that_says_next_to_nothing_is_short(low: float, high: float, text: str) -> None:
    assert str(Ratio(1.1, low, high, noise=0.01)) == text
