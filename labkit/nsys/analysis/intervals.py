"""Arithmetic of half-open intervals of time, in int64 nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.arrays import Ints


@dataclass(frozen=True)
class Union:
    """Disjoint intervals in the order of time."""

    start_ns: Ints
    end_ns: Ints

    @classmethod
    def of(cls, start_ns: Ints, end_ns: Ints) -> Union:
        """The times that at least one of these intervals covers."""
        order = np.argsort(start_ns, kind="stable")
        start, end = start_ns[order], np.maximum.accumulate(np.maximum(start_ns, end_ns)[order])
        begins = np.ones(len(start), bool)
        begins[1:] = start[1:] > end[:-1]
        last = np.append(np.nonzero(begins)[0][1:], len(start))[: begins.sum()] - 1
        return cls(start[begins], end[last])

    @property
    def total_ns(self) -> int:
        return int((self.end_ns - self.start_ns).sum())

    def covered_ns(self, start_ns: Ints, end_ns: Ints) -> Ints:
        """How much of each interval lies within the union."""
        return self._before(end_ns) - self._before(start_ns)

    def _before(self, time_ns: Ints) -> Ints:
        if not len(self.start_ns):
            return np.zeros(len(time_ns), np.int64)
        lengths = self.end_ns - self.start_ns
        index = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        at = np.maximum(index, 0)
        earlier = (np.cumsum(lengths) - lengths)[at]
        return np.where(index < 0, 0, earlier + np.clip(time_ns - self.start_ns[at], 0, lengths[at]))


def fresh_start_ns(start_ns: Ints, end_ns: Ints, group: NDArray[np.integer] | None = None) -> Ints:
    """The start of the part of each interval that no earlier interval of its group covers.

    The time in which intervals overlap counts once, for the first to begin. The parts are disjoint and add up to the
    union. The part of an interval that adds nothing begins at the interval's end.
    """
    groups = np.zeros(len(start_ns), np.int64) if group is None else group
    order = np.lexsort((start_ns, groups))
    start, end, ordered = start_ns[order], end_ns[order], groups[order]
    reached = pd.Series(end).groupby(ordered, sort=False).cummax()
    before = reached.groupby(ordered, sort=False).shift(fill_value=np.iinfo(np.int64).min).to_numpy()
    fresh = np.empty(len(start), np.int64)
    fresh[order] = np.minimum(np.maximum(start, before), end)
    return fresh


def innermost_ns(start_ns: Ints, end_ns: Ints) -> Ints:
    """The time for which each interval is the last to have begun: for nested ranges, the time outside inner ranges."""
    rows = np.nonzero(end_ns > start_ns)[0]
    start, end = start_ns[rows], end_ns[rows]
    times, opens = np.concatenate((start, end)), np.repeat((1, 0), len(rows))
    order = np.lexsort((np.concatenate((-end, end)), opens, times))  # at one time: ends first, then the longest
    indices = np.tile(np.arange(len(rows)), 2)[order].tolist()
    own, ended, now = [0] * len(rows), [False] * len(rows), 0
    stack: list[int] = []
    for time, opening, index in zip(times[order].tolist(), opens[order].tolist(), indices, strict=True):
        while stack and ended[stack[-1]]:
            stack.pop()
        if stack:
            own[stack[-1]] += time - now
        now = time
        if opening:
            stack.append(index)
        else:
            ended[index] = True
    result = np.zeros(len(start_ns), np.int64)
    result[rows] = own
    return result
