"""Containment of intervals: NVTX ranges around API calls and around each other.

An interval contains another of its thread that starts no earlier and ends no later. Push/pop ranges nest, but
start/end ranges may overlap in any way, so the functions do not assume a stack.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.arrays import Ints

NONE = -1  # no row


@dataclass(frozen=True)
class Intervals:
    """Starts and ends on one line."""

    start: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, rows: Ints | NDArray[np.bool_]) -> Intervals:
        return Intervals(self.start[rows], self.end[rows])


def numbered(frames: Sequence[pd.DataFrame], column: str) -> list[Ints]:
    """Small numbers for the pairs (process, `column`) of some frames, the same number for the same pair."""
    numbers, _ = pd.factorize(np.concatenate([frame[column].to_numpy() for frame in frames]))
    processes = np.concatenate([frame["process"].to_numpy() for frame in frames]).astype(np.int64)
    pairs, _ = pd.factorize(processes * (numbers.max(initial=0) + 1) + numbers)
    return np.split(pairs, np.cumsum([len(frame) for frame in frames])[:-1])


def on_one_line(frames: Sequence[pd.DataFrame]) -> list[Intervals]:
    """The intervals of some frames, with their threads laid end to end, so that containment is within a thread."""
    threads = numbered(frames, "tid")
    thread = np.concatenate(threads)
    starts = np.concatenate([frame["start_ns"].to_numpy() for frame in frames])
    ends = np.concatenate([frame["end_ns"].to_numpy() for frame in frames])
    count = thread.max(initial=-1) + 1
    first, last = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(first, thread, starts)
    np.maximum.at(last, thread, ends)
    begins = np.concatenate([[0], np.cumsum(last - first + 1)[:-1]]) if count else first
    shift = begins - first
    return [
        Intervals(frame["start_ns"].to_numpy() + shift[own], frame["end_ns"].to_numpy() + shift[own])
        for frame, own in zip(frames, threads, strict=True)
    ]


class _Opened:
    """The intervals that can still be the tightest around a later one, during a sweep over the starts.

    They are sorted by falling ends. Their lengths fall too: an interval is dropped when a shorter one with a later end
    begins, because it can never be the tightest again.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []  # negative, so that they rise
        self._rows: list[int] = []

    def around(self, start: int, end: int) -> int:
        """The row of the tightest interval around the next one, or NONE. Starts must not fall from call to call."""
        self._close(start)
        place = bisect_right(self._ends, -end)
        return self._rows[place - 1] if place else NONE

    def enter(self, row: int, start: int, end: int) -> int:
        """Opens the next interval and returns the row of the tightest around it, or NONE."""
        self._close(start)
        place = bisect_right(self._ends, -end)
        parent = self._rows[place - 1] if place else NONE
        worse = place
        while worse < len(self._ends) and -self._ends[worse] - self._starts[worse] >= end - start:
            worse += 1
        self._starts[place:worse], self._ends[place:worse], self._rows[place:worse] = [start], [-end], [row]
        return parent

    def _close(self, now: int) -> None:
        while self._ends and -self._ends[-1] < now:
            self._starts.pop()
            self._ends.pop()
            self._rows.pop()


def parents(intervals: Intervals) -> tuple[Ints, Ints]:
    """For each interval the tightest one around it, or NONE, and its level: the number of intervals around it.

    If intervals have the same bounds, each is the parent of the next row. If several are equally tight, the last to
    start is the parent.
    """
    parent, level = np.full(len(intervals), NONE), np.zeros(len(intervals), np.int64)
    order = np.lexsort((-intervals.end, intervals.start))
    opened, levels = _Opened(), {NONE: -1}
    tightest_rows = []
    for row, start, end in zip(
        order.tolist(), intervals.start[order].tolist(), intervals.end[order].tolist(), strict=True
    ):
        around = opened.enter(row, start, end)
        levels[row] = levels[around] + 1
        tightest_rows.append(around)
    parent[order] = tightest_rows
    level[order] = [levels[row] for row in order.tolist()]
    return parent, level


def tightest(intervals: Intervals, inner: Intervals) -> Ints:
    """For each of `inner`, the row of the tightest of `intervals` around it, or NONE."""
    if not len(intervals) or not len(inner):
        return np.full(len(inner), NONE)
    # Inner intervals that start between the same two bounds, and end between the same two, have the same answer.
    bounds = np.unique(np.concatenate([intervals.start, intervals.end]))
    places = _places(bounds, inner.start) * (2 * len(bounds) + 2) + _places(bounds, inner.end)
    _, distinct, where = np.unique(places, return_index=True, return_inverse=True)
    order = np.lexsort((-intervals.end, intervals.start))
    starts, ends = intervals.start[order].tolist(), intervals.end[order].tolist()
    opened, answers, entered = _Opened(), [], 0
    for start, end in zip(inner.start[distinct].tolist(), inner.end[distinct].tolist(), strict=True):
        while entered < len(starts) and starts[entered] <= start:
            opened.enter(int(order[entered]), starts[entered], ends[entered])
            entered += 1
        answers.append(opened.around(start, end))
    return np.array(answers)[where]


def _places(bounds: Ints, times: Ints) -> Ints:
    """The place of each time among the bounds: an even number between two of them, an odd one on a bound."""
    after = np.searchsorted(bounds, times)
    return 2 * after + (bounds[np.minimum(after, len(bounds) - 1)] == times)


def windows(outer: Intervals, inner: Intervals) -> Iterator[tuple[Ints, Ints, Ints]]:
    """The rows of `inner` that each of `outer` contains, as windows into lists.

    Yields (rows, low, high): a list of rows of `inner`, and for each of `outer` the window [low, high) of that list
    that it contains. Every row is in exactly one list. The number of lists is the depth to which `inner` is nested,
    because neither starts nor ends may fall within a list.
    """
    rows = np.lexsort((inner.end, inner.start))
    while len(rows):
        ends = inner.end[rows]
        rising = ends >= np.maximum.accumulate(ends)
        chain, rows = rows[rising], rows[~rising]
        low = np.searchsorted(inner.start[chain], outer.start)
        high = np.searchsorted(inner.end[chain], outer.end, side="right")
        yield chain, low, np.maximum(low, high)


def over_windows(ufunc: np.ufunc, values: Ints, low: Ints, high: Ints, nothing: int) -> Ints:
    """ufunc.reduce(values[low:high]) of each window, for a ufunc like minimum that may see a value twice."""
    result = np.full(len(low), nothing)
    octave = np.frexp((high - low).astype(float))[1] - 1  # the largest power of two within the window; -1: empty
    for exponent in range(octave.max(initial=-1) + 1):
        step = 1 << exponent
        at = np.flatnonzero(octave == exponent)
        result[at] = ufunc(values[low[at]], values[high[at] - step])
        values = ufunc(values[:-step], values[step:])
    return result


def runs(low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """All numbers from low[i] to high[i] - 1, for each i in turn: (the i of each number, the numbers)."""
    lengths = high - low
    before = np.cumsum(lengths) - lengths
    return np.repeat(np.arange(len(low)), lengths), np.arange(lengths.sum()) + np.repeat(low - before, lengths)


def matches(left: Ints, right: Ints) -> tuple[Ints, Ints]:
    """All (i, j) with left[i] == right[j], in the order of i; (i, NONE) for an i without a j."""
    order = np.argsort(right, kind="stable")
    low, high = (np.searchsorted(right[order], left, side=side) for side in ("left", "right"))  # type: ignore[call-overload]
    i, place = runs(low, np.maximum(high, low + 1))
    j = np.append(order, NONE)[np.minimum(place, len(order))]
    return i, np.where((low == high)[i], NONE, j)
