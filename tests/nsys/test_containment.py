"""Intervals within intervals: the fast sweeps agree with a comparison of every pair."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.nsys.analysis.containment import (
    NONE,
    Intervals,
    matches,
    numbered,
    on_one_line,
    over_windows,
    parents,
    runs,
    tightest,
    windows,
)
from labkit.nsys.trace import typed


def random_intervals(random: np.random.Generator, count: int, span: int) -> Intervals:
    start = random.integers(0, span, count)
    return Intervals(start, start + random.integers(0, span // 2, count))


def contains(outer: Intervals, inner: Intervals) -> np.ndarray:
    return (outer.start[:, None] <= inner.start) & (outer.end[:, None] >= inner.end)


@pytest.mark.parametrize("seed", range(40))
def test_the_tightest_is_the_shortest_of_all_around_it(seed: int) -> None:
    random = np.random.default_rng(seed)
    span = int(random.choice([6, 40, 10_000]))  # in a small span many bounds are equal
    outer, inner = random_intervals(random, 63, span), random_intervals(random, 90, span)
    tightest_rows, around = tightest(outer, inner), contains(outer, inner)
    length = outer.end - outer.start
    for row, holder in enumerate(tightest_rows.tolist()):
        holders = np.flatnonzero(around[:, row])
        assert (holder == NONE) == (len(holders) == 0)
        assert holder == NONE or (holder in holders and length[holder] == length[holders].min())


@pytest.mark.parametrize("seed", range(40))
def test_a_parent_is_the_tightest_other_and_levels_count_parents(seed: int) -> None:
    random = np.random.default_rng(seed)
    span = int(random.choice([6, 40, 10_000]))
    ranges = random_intervals(random, 63, span)
    parent, level = parents(ranges)
    length, around = ranges.end - ranges.start, contains(ranges, ranges)
    for row, holder in enumerate(parent.tolist()):
        others = np.flatnonzero(around[:, row] & (np.arange(63) != row))
        strictly = others[length[others] > length[row]]
        if holder == NONE:
            assert not len(strictly)
            assert level[row] == 0
        else:
            assert holder in others
            assert length[holder] == length[row] or length[holder] == length[strictly].min()
            assert level[row] == level[holder] + 1


def test_intervals_with_equal_bounds_are_children_of_the_one_before() -> None:
    parent, level = parents(Intervals(np.array([0, 5, 5, 5, 6]), np.array([20, 9, 9, 9, 7])))
    assert parent.tolist() == [NONE, 0, 1, 2, 3]
    assert level.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(20))
def test_windows_hold_every_contained_interval_once(seed: int) -> None:
    random = np.random.default_rng(seed)
    outer, inner = random_intervals(random, 40, 60), random_intervals(random, 70, 60)
    seen = np.zeros((40, 70), int)
    for rows, low, high in windows(outer, inner):
        around, place = runs(low, high)
        np.add.at(seen, (around, rows[place]), 1)
    assert np.array_equal(seen, contains(outer, inner).astype(int))


def test_calls_in_a_row_take_one_list_and_nested_calls_one_more_each() -> None:
    row = Intervals(np.arange(0, 100, 10), np.arange(5, 105, 10))
    assert len(list(windows(row, row))) == 1
    nested = Intervals(np.concatenate([row.start, row.start + 1]), np.concatenate([row.end, row.end - 1]))
    assert len(list(windows(row, nested))) == 2


@pytest.mark.parametrize("seed", range(10))
def test_minima_over_windows_are_those_of_each_slice(seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.integers(-1000, 1000, 77)
    low = random.integers(0, 78, 200)
    high = np.minimum(low + random.integers(0, 78, 200), 77)
    high = np.maximum(low, high)
    expected = [values[a:b].min() if b > a else 9999 for a, b in zip(low, high, strict=True)]
    assert over_windows(np.minimum, values, low, high, 9999).tolist() == expected


def test_matches_are_a_left_join() -> None:
    rows, partners = matches(np.array([3, 7, 3, 1]), np.array([3, 9, 1, 3]))
    assert list(zip(rows.tolist(), partners.tolist(), strict=True)) == [
        (0, 0),
        (0, 3),
        (1, NONE),
        (2, 0),
        (2, 3),
        (3, 2),
    ]
    empty = np.empty(0, np.int64)
    assert matches(np.array([5]), empty)[1].tolist() == [NONE]
    assert matches(empty, np.array([5]))[0].tolist() == []


def test_threads_laid_end_to_end_do_not_contain_each_other() -> None:
    """The same tid in two processes means two threads, and times since the epoch do not overflow."""
    epoch = 1_795_308_548_674_607_415
    columns = {"process": [0, 1, 1], "tid": [7, 7, 8], "start_ns": [0, epoch, 5], "end_ns": [90, epoch + 50, 6]}
    ranges, calls = typed("ranges", columns), typed("calls", columns)
    assert [pair.tolist() for pair in numbered([ranges, calls], "tid")] == [[0, 1, 2], [0, 1, 2]]
    line, inner = on_one_line([ranges, calls])
    assert np.array_equal(contains(line, inner), np.eye(3, dtype=bool))
    assert tightest(line, inner).tolist() == [0, 1, 2]
