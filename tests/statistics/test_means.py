"""The interval of a mean over groups contains the true mean in the stated share of cases."""

import numpy as np
import pytest
from scipy import stats

from labkit.statistics import mean_of_groups


def test_groups_of_one_size_give_students_interval() -> None:
    values = [1.0, 2.0, 4.0, 4.5]
    mean = mean_of_groups(values, [7] * 4)
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert (mean.value, mean.low, mean.high) == pytest.approx((np.mean(values), low, high))


def test_a_larger_group_counts_for_more() -> None:
    assert mean_of_groups([1.0, 2.0], [1, 3]).value == 1.75


def test_one_group_has_no_interval() -> None:
    assert mean_of_groups([3.0], [5]).low is None


def test_an_increasing_function_of_the_mean_takes_the_ends_along() -> None:
    mean, mapped = mean_of_groups([1.0, 2.0], [1, 1]), mean_of_groups([1.0, 2.0], [1, 1]).map(np.exp)
    assert mean.low is not None
    assert (mapped.value, mapped.low) == (np.exp(1.5), np.exp(mean.low))


def test_the_interval_holds_the_truth_in_95_of_100_cases() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(600):
        sizes = np.array([511] * 8 + [200])
        mean = mean_of_groups((3.0 + rng.normal(0, 20 / np.sqrt(sizes))).tolist(), sizes.tolist())
        assert mean.low is not None
        assert mean.high is not None
        covered += mean.low <= 3.0 <= mean.high
    assert 0.92 <= covered / 600 <= 0.98
