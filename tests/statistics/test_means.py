"""The interval of a mean over groups holds the truth as often as it says."""

import numpy as np
import pytest
from scipy import stats

from labkit.statistics import mean_of_groups


def test_groups_of_one_size_give_students_interval() -> None:
    values = [1.0, 2.0, 4.0, 4.5]
    found = mean_of_groups(values, [7] * 4)
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert (found.value, found.low, found.high) == pytest.approx((np.mean(values), low, high))


def test_a_larger_group_counts_for_more() -> None:
    assert mean_of_groups([1.0, 2.0], [1, 3]).value == 1.75


def test_one_group_has_no_interval() -> None:
    assert mean_of_groups([3.0], [5]).low is None


def test_an_increasing_function_of_the_mean_takes_the_ends_along() -> None:
    found, mapped = mean_of_groups([1.0, 2.0], [1, 1]), mean_of_groups([1.0, 2.0], [1, 1]).map(np.exp)
    assert found.low is not None
    assert (mapped.value, mapped.low) == (np.exp(1.5), np.exp(found.low))


def test_the_interval_holds_the_truth_in_95_of_100_cases() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(600):
        sizes = np.array([511] * 8 + [200])
        found = mean_of_groups((3.0 + rng.normal(0, 20 / np.sqrt(sizes))).tolist(), sizes.tolist())
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 3.0 <= found.high
    assert 0.92 <= held / 600 <= 0.98
