"""Arithmetic of intervals agrees with counting nanosecond by nanosecond."""

import numpy as np
import pytest

from labkit.nsys.analysis.intervals import Union, fresh_start_ns, innermost_ns
from labkit.nsys.arrays import Ints

LENGTH = 60


def random_intervals(seed: int) -> tuple[Ints, Ints, np.ndarray]:
    """Up to twelve intervals, some of zero length, and the moments that each covers."""
    random = np.random.default_rng(seed)
    start = random.integers(0, 40, random.integers(0, 12))
    end = start + random.integers(0, 15, len(start))
    moments = np.arange(LENGTH)
    return start, end, (moments >= start[:, None]) & (moments < end[:, None])


@pytest.mark.parametrize("seed", range(60))
def test_a_union_covers_what_any_interval_covers(seed: int) -> None:
    start, end, covers = random_intervals(seed)
    union = Union.of(start, end)
    assert union.total_ns == covers.any(axis=0).sum()
    assert (union.start_ns[1:] > union.end_ns[:-1]).all()
    edges = np.sort(np.random.default_rng(seed).integers(0, LENGTH, (8, 2)), axis=1)
    covered = np.flatnonzero(covers.any(axis=0))
    inside = [int(((covered >= left) & (covered < right)).sum()) for left, right in edges]
    assert union.covered_ns(edges[:, 0], edges[:, 1]).tolist() == inside


@pytest.mark.parametrize("seed", range(60))
def test_overlapping_time_counts_for_the_one_that_began_first(seed: int) -> None:
    start, end, covers = random_intervals(seed)
    begins = fresh_start_ns(start, end)
    assert (end - begins).sum() == covers.any(axis=0).sum()
    for index in range(len(start)):
        earlier = covers[(start < start[index]) | ((start == start[index]) & (np.arange(len(start)) < index))].any(
            axis=0
        )
        assert end[index] - begins[index] == (covers[index] & ~earlier).sum()


def test_groups_do_not_cover_each_other() -> None:
    start, end, group = np.array([0, 2, 1]), np.array([10, 5, 4]), np.array([7, 7, 3])
    assert fresh_start_ns(start, end, group).tolist() == [0, 5, 1]


@pytest.mark.parametrize("seed", range(60))
def test_time_belongs_to_the_interval_that_began_last(seed: int) -> None:
    start, end, covers = random_intervals(seed)
    own_ns = innermost_ns(start, end)
    assert own_ns.sum() == covers.any(axis=0).sum()
    assert (own_ns <= end - start).all()


def test_a_nested_range_is_taken_from_the_one_around_it() -> None:
    start, end = np.array([0, 2, 3, 20]), np.array([10, 6, 4, 25])
    assert innermost_ns(start, end).tolist() == [6, 3, 1, 5]
