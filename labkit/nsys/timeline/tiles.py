"""A timeline at any scale: wide events one by one, and narrow events as the busy time of each column.

A tile is COLUMNS columns of all lanes. All tiles of a level have columns of the same width, a power of two of
nanoseconds, and each further level halves it. A tile costs the same whether it spans a microsecond or the whole trace,
because the busy time of a column is the difference of two running sums at its edges.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from labkit.nsys.analysis.nesting import stable_order
from labkit.nsys.arrays import Ints
from labkit.nsys.timeline.lanes import Lanes
from labkit.nsys.timeline.shades import Codes
from labkit.system.errors import UserError

COLUMNS = 512
WIDE = 2  # the least number of columns of an event that is drawn by itself
FAINTEST = 48  # of 255, for a column that holds anything at all
LEVELS_KEPT = 12


@dataclass(frozen=True)
class TimelineTile:
    """A part of the timeline at one scale. `shade` and `fill`: a row per lane of `lanes`, a column per tile column."""

    events: Ints  # at least WIDE columns wide, in the order of their shades
    lanes: NDArray[np.int32]  # not empty in this tile
    shade: Codes  # the shade of most of the busy time
    fill: Codes  # busy time, as a share of 255


class Tiles:
    """The tiles of `lanes`. Level 0 is one tile, which begins at `origin` and has columns of 2**`exponent` ns."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        first, last = lanes.span
        self.origin = first
        self.exponent = max(int(last - first).bit_length() - COLUMNS.bit_length() + 1, 0)
        self.levels = self.exponent + 1  # the last has columns of 1 ns
        self._size = (COLUMNS << self.exponent) + 2  # more than any time from the origin
        self._keys = lanes.lane.astype(np.int64) * self._size + (lanes.start - first)
        self._sum_by_shade()
        self._wide: OrderedDict[int, Ints] = OrderedDict()
        self._lock = Lock()

    def _sum_by_shade(self) -> None:
        """Computes running sums over the events of each lane and shade ("row"), which do not overlap either."""
        lanes = self.lanes
        row = lanes.lane.astype(np.int64) * len(lanes.shades) + lanes.shade
        order = stable_order(row)
        first = np.flatnonzero(np.diff(row[order], prepend=-1))
        self._row_first = first
        self._row_lane, self._row_shade = np.divmod(row[order][first], len(lanes.shades))
        number = np.repeat(np.arange(len(first)), np.diff(first, append=len(row)))
        self._row_keys = number * self._size + (lanes.start[order] - self.origin)
        self._row_ends = lanes.end[order] - self.origin
        self._row_sums = np.concatenate([[0], np.cumsum(lanes.end[order] - lanes.start[order])])

    def tile(self, level: int, index: int) -> TimelineTile:
        """One tile. Raises ValueError for a tile that does not exist."""
        if not (0 <= level < self.levels and 0 <= index < 1 << level):
            raise UserError(
                f"got tile {index} of level {level}; expected a level below {self.levels} and index below 2**level"
            )
        width = 1 << (self.exponent - level)
        edges = (index * COLUMNS + np.arange(COLUMNS + 1, dtype=np.int64)) * width
        events = self._events(int(edges[0]), int(edges[-1]), WIDE * width)
        events = events[stable_order(self.lanes.shade[events])]
        return TimelineTile(events, *self._columns(edges))

    def _events(self, begin: int, end: int, at_least: int) -> Ints:
        """The events between two times from the origin that are not shorter than `at_least`."""
        starts = np.arange(self.lanes.count) * self._size
        low = np.searchsorted(self._keys, starts + max(begin, 0), side="right")
        high = np.searchsorted(self._keys, starts + min(end, self._size - 1), side="left")
        before = np.maximum(low - 1, self.lanes.bounds[:-1])  # events do not overlap, so at most one began earlier
        low = np.where(self.lanes.end[np.minimum(before, len(self.lanes) - 1)] - self.origin > begin, before, low)
        wide = self._at_least(at_least)
        slices = zip(np.searchsorted(wide, low), np.searchsorted(wide, np.maximum(low, high)), strict=True)
        return np.concatenate([wide[a:b] for a, b in slices])

    def _at_least(self, ns: int) -> Ints:
        with self._lock:
            if ns in self._wide:
                self._wide.move_to_end(ns)
                return self._wide[ns]
        events = np.flatnonzero(self.lanes.end - self.lanes.start >= ns)
        with self._lock:
            self._wide[ns] = events
            while len(self._wide) > LEVELS_KEPT:
                self._wide.popitem(last=False)
        return events

    def _columns(self, edges: Ints) -> tuple[NDArray[np.int32], Codes, Codes]:
        """The lanes that are not empty between these edges, with the main shade and the fill of each column."""
        limits = np.arange(len(self._row_first))[:, None] * self._size
        some = np.searchsorted(self._row_keys, (limits + np.clip(edges[[0, -1]], 0, self._size - 1)).ravel()).reshape(
            -1, 2
        )
        rows = np.flatnonzero((some[:, 1] > some[:, 0]) | self._running(some[:, 0], int(edges[0])))
        if not len(rows):
            empty = np.zeros((0, len(edges) - 1), np.uint8)
            return np.zeros(0, np.int32), empty, empty
        keys = rows[:, None] * self._size + np.clip(edges, 0, self._size - 1)
        counts = np.searchsorted(self._row_keys, keys.ravel(), side="left").reshape(keys.shape)
        last = np.maximum(counts - 1, 0)
        beyond = np.where(counts > self._row_first[rows, None], np.maximum(self._row_ends[last] - edges, 0), 0)
        busy = np.diff(self._row_sums[counts] - beyond, axis=1)
        weight = busy + (np.diff(counts, axis=1) > 0)  # an event of no length counts too

        lane = self._row_lane[rows]
        heads = np.flatnonzero(np.diff(lane, prepend=-1))
        total = np.add.reduceat(busy, heads, axis=0)
        is_busy = np.add.reduceat(weight, heads, axis=0) > 0
        shade = np.empty(total.shape, np.uint8)
        for at, (a, b) in enumerate(zip(heads, np.append(heads[1:], len(rows)), strict=True)):
            shade[at] = self._row_shade[rows[a:b]][weight[a:b].argmax(axis=0)]
        fill = (total * 255 // np.diff(edges)).clip(FAINTEST, 255).astype(np.uint8)
        return lane[heads].astype(np.int32), shade, np.where(is_busy, fill, 0).astype(np.uint8)

    def _running(self, counts: Ints, time: int) -> NDArray[np.bool_]:
        """For each row, whether the last event before position `counts` of the sums still runs at `time`."""
        return (counts > self._row_first) & (self._row_ends[np.maximum(counts - 1, 0)] > time)
