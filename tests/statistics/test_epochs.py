"""The rule for epochs on simulated machines whose pairs are correlated, whose placements differ and drift, and whose
memory changes its mode.
"""

from dataclasses import replace

import numpy as np
import pytest
from helpers.studies.simulated_turns import PAIRS, TURNS, Samples
from numpy.typing import NDArray

from labkit.statistics import Verdict
from labkit.statistics.sequential import EPOCHS, EPOCHS_SHARED, Rule, centre, interval_at, interval_of, sequential_ratio

COMPARISONS, IN_A_MINUTE = 600, 30  # epochs
Ends = NDArray[np.float64]  # [comparison]


def stopped(logs: Samples, rule: Rule = EPOCHS) -> tuple[Ends, Ends]:
    """Both ends of the interval at the first look with a verdict, or at the last look."""
    low, high = np.full((2, len(logs)), np.nan)
    look, count, still_open = 1, rule.first_look, np.arange(len(logs))
    beyond, within = np.log1p(rule.noise), np.log1p(rule.same)
    while still_open.size and count <= logs.shape[1]:
        _, low[still_open], high[still_open] = interval_at(logs[still_open, :count], look, rule)
        lows, highs = low[still_open], high[still_open]
        decided = (lows > beyond) | (highs < -beyond) | ((-within <= lows) & (highs <= within))
        still_open = still_open[~decided]
        last = count == logs.shape[1]
        look, count = look + 1, rule.next_look(count)
        count = count if last else min(count, logs.shape[1])
    return low, high


@pytest.mark.parametrize("machine", TURNS)
@pytest.mark.parametrize("most", [4, IN_A_MINUTE])
def test_however_often_it_looks_the_interval_holds_the_truth(machine: str, most: int) -> None:
    logs = TURNS[machine].epochs(np.random.default_rng(5), COMPARISONS, most)
    low, high = stopped(logs)
    misses = np.mean((low > 0) | (high < 0))
    assert misses <= EPOCHS.error
    beyond = np.log1p(EPOCHS.noise)
    assert np.mean((low > beyond) | (high < -beyond)) <= 0.02  # FASTER or SLOWER than itself


@pytest.mark.parametrize(("machine", "least"), [("steady", 0.99), ("places", 0.95), ("modes", 0.95)])
def test_a_side_is_the_same_as_itself_within_a_minute(machine: str, least: float) -> None:
    low, high = stopped(TURNS[machine].epochs(np.random.default_rng(6), COMPARISONS, IN_A_MINUTE))
    within = np.log1p(EPOCHS.same)
    assert np.mean((-within <= low) & (high <= within)) >= least


@pytest.mark.parametrize(
    ("speedup", "machine", "least"), [(1.05, "modes", 0.97), (1.10, "places", 0.99), (2.0, "shared", 0.99)]
)
def test_a_difference_is_found_within_a_minute(speedup: float, machine: str, least: float) -> None:
    low, _ = stopped(TURNS[machine].epochs(np.random.default_rng(7), COMPARISONS, IN_A_MINUTE, speedup))
    assert np.mean(low > np.log1p(EPOCHS.noise)) >= least


def test_a_few_epochs_that_agree_by_chance_decide_only_what_places_cannot_make() -> None:
    agreeing = np.array([-0.0001, 0.0, 0.0001])
    assert sequential_ratio(agreeing - 0.0173, 1, EPOCHS).verdict is Verdict.UNDECIDED
    assert sequential_ratio(agreeing - 0.0173, 1, replace(EPOCHS, least_scatter=0.0)).verdict is Verdict.SLOWER
    assert sequential_ratio(agreeing - 0.05, 1, EPOCHS).verdict is Verdict.SLOWER
    assert sequential_ratio(agreeing, 1, EPOCHS).verdict is Verdict.SAME


def test_places_that_stay_in_a_quiet_stretch_do_not_pass_for_a_difference() -> None:
    """In half of the comparisons the epochs hardly scatter, although one side is slower during all of them."""
    random = np.random.default_rng(11)
    quiet = random.random((COMPARISONS, 1)) < 0.5
    logs = random.normal(0, np.where(quiet, 0.001, 0.02), (COMPARISONS, IN_A_MINUTE))
    logs[:, :4] += np.where(quiet, random.normal(0, 0.01, (COMPARISONS, 1)), 0)
    logs[:, 4:] += random.normal(0, 0.02, (COMPARISONS, IN_A_MINUTE - 4))

    def wrong(rule: Rule) -> float:
        low, high = stopped(logs, rule)
        beyond = np.log1p(rule.noise)
        return float(np.mean((low > beyond) | (high < -beyond)))

    assert wrong(EPOCHS) <= 0.02
    assert wrong(EPOCHS_SHARED) > 0.05  # without limits


def test_pairs_alone_would_find_differences_that_are_not_there() -> None:
    """Shows why epochs are the samples: the pairs of one placement have a narrow interval around a wrong ratio."""
    logs = np.random.default_rng(8).normal(0, 0.02, (COMPARISONS, PAIRS * 4))
    logs += np.random.default_rng(9).normal(0, 0.025, (COMPARISONS, 1))
    _, low, high = interval_of(logs, 0.05)
    assert np.mean((low > 0) | (high < 0)) > 0.5


def test_the_centre_scatters_less_than_the_median_and_hardly_follows_disturbed_pairs() -> None:
    logs = np.random.default_rng(10).normal(0, 0.05, (400, 12))
    centres, medians = np.array([centre(pairs) for pairs in logs]), np.median(logs, axis=1)
    assert centres.std() < 0.9 * medians.std()
    disturbed = logs.copy()
    disturbed[:, :2] += 3.0
    assert np.abs([centre(pairs) for pairs in disturbed]).mean() < 0.05 < disturbed.mean()
