"""Levels, nesting and crossing of intervals agree with plain definitions."""

from typing import SupportsIndex

import numpy as np
import pytest

from labkit.nsys.analysis.nesting import crossing, innermost, levels
from labkit.nsys.arrays import Ints


def random_intervals(seed: int, count: int = 300) -> tuple[Ints, Ints, Ints]:
    """Start, end and group of intervals that nest, cross, touch and have zero length."""
    random = np.random.default_rng(seed)
    start = random.integers(-500, 1000, count)
    length = random.choice([0, 1, 7, 60, 400], count)
    return start, start + length, random.integers(0, 4, count)


def nested(seed: int, count: int = 300) -> tuple[Ints, Ints, Ints]:
    """Intervals of push and pop: every end closes the interval that was opened last."""
    random = np.random.default_rng(seed)
    time = 0
    opened: list[int] = []
    intervals: list[tuple[int, int]] = []
    while len(intervals) < count:
        time += int(random.integers(1, 5))
        if opened and random.random() < 0.5:
            intervals.append((opened.pop(), time))
        else:
            opened.append(time)
    start, end = np.array(sorted(intervals)).T
    return start, end, np.zeros(count, np.int64)


def holds(start: Ints, end: Ints, outer: SupportsIndex, inner: SupportsIndex) -> bool:
    return bool(start[outer] <= start[inner] and end[inner] <= end[outer])


@pytest.mark.parametrize("seed", range(20))
def test_no_two_on_a_level_overlap(seed: int) -> None:
    start, end, group = random_intervals(seed)
    level = levels(start, end, group)
    end = np.maximum(end, start + 1)
    order = np.lexsort((start, level, group))
    same = (group[order][1:] == group[order][:-1]) & (level[order][1:] == level[order][:-1])
    assert np.all(end[order][:-1][same] <= start[order][1:][same])


@pytest.mark.parametrize("seed", range(5))
def test_what_nests_is_as_deep_as_there_are_intervals_around_it(seed: int) -> None:
    start, end, group = nested(seed)
    around = [sum(holds(start, end, outer, inner) for outer in range(len(start))) - 1 for inner in range(len(start))]
    assert levels(start, end, group).tolist() == around
    shuffled = np.random.default_rng(seed).permutation(len(start))
    assert levels(start[shuffled], end[shuffled], group).tolist() == np.array(around)[shuffled].tolist()


@pytest.mark.parametrize("seed", range(5))
def test_the_innermost_is_the_last_that_was_opened_and_holds_it(seed: int) -> None:
    start, end, group = nested(seed)
    random = np.random.default_rng(seed)
    begins = random.integers(start.min() - 3, end.max() + 3, 200)
    ends = begins + random.integers(0, 20, 200)
    rows = innermost(begins, ends, np.zeros(200, np.int64), (start, end, group))
    for begin, stop, row in zip(begins, ends, rows, strict=True):
        around = np.flatnonzero((start <= begin) & (stop <= end))
        assert row == (around[np.argmax(start[around])] if len(around) else -1)


def test_nothing_is_inside_what_another_thread_opened() -> None:
    thread_0, thread_1 = np.zeros(1, np.int64), np.ones(1, np.int64)
    assert innermost(thread_0 + 2, thread_0 + 3, thread_1, (thread_0, thread_0 + 9, thread_0)).tolist() == [-1]
    assert innermost(thread_0 + 2, thread_0 + 3, thread_0, (thread_0, thread_0 + 9, thread_0)).tolist() == [0]


@pytest.mark.parametrize("seed", range(20))
def test_intervals_that_do_not_cross_nest(seed: int) -> None:
    start, end, group = random_intervals(seed)
    kept = np.flatnonzero(~crossing(start, end, group))
    for first in kept:
        for second in kept:
            if first < second and group[first] == group[second]:
                apart = end[first] <= start[second] or end[second] <= start[first]
                assert apart or holds(start, end, first, second) or holds(start, end, second, first)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_taken_out_of_what_nests(seed: int) -> None:
    assert not crossing(*nested(seed)).any()


def test_no_intervals_give_empty_results() -> None:
    empty = np.zeros(0, np.int64)
    assert len(levels(empty, empty, empty)) == len(crossing(empty, empty, empty)) == 0
    assert innermost(empty + 1, empty, empty, (empty, empty, empty)).tolist() == []
