"""A part of a timeline as rectangles, for a page that cannot ask for more detail later."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from labkit.nsys.arrays import Ints
from labkit.nsys.timeline.lanes import Lanes
from labkit.nsys.timeline.shades import Codes

CLASSES = 4  # of busyness; neighbouring columns of the same class are merged


@dataclass(frozen=True)
class Rectangles:
    """Arrays with an element for each rectangle, which is an event, or several narrow events of a lane."""

    lane: NDArray[np.int32]
    start: Ints
    end: Ints
    shade: Codes  # the shade that takes most of the rectangle's time
    busy: NDArray[np.float64]  # share of the rectangle
    events: Ints  # their number
    event: Ints  # the event of a rectangle with one event; else -1

    def __len__(self) -> int:
        return len(self.lane)


def rectangles(lanes: Lanes, begin: int, end: int, columns: int) -> Rectangles:
    """The rectangles between two times: one for each event wider than a column, and narrower events merged."""
    seen = np.flatnonzero((lanes.start < end) & (lanes.end >= begin))
    column_ns = max((end - begin) / columns, 1.0)
    narrow = lanes.end[seen] - lanes.start[seen] < column_ns
    alone = seen[~narrow]
    wide = Rectangles(
        lanes.lane[alone], lanes.start[alone], lanes.end[alone], lanes.shade[alone],
        np.ones(len(alone)), np.ones(len(alone), np.int64), alone,
    )  # fmt: skip
    if not narrow.any():
        return wide
    merged = _merged(lanes, seen[narrow], begin, column_ns)
    return Rectangles(
        *(np.concatenate([getattr(wide, part.name), getattr(merged, part.name)]) for part in fields(wide))
    )


def _merged(lanes: Lanes, events: Ints, begin: int, column_ns: float) -> Rectangles:
    """Merges `events` by lane and column, then runs of columns of one shade and class, with no wide event between."""
    column = ((lanes.start[events] - begin) / column_ns).astype(np.int64)
    lane = lanes.lane[events].astype(np.int64)
    heads = np.flatnonzero((np.diff(column, prepend=-(1 << 40)) != 0) | (np.diff(lane, prepend=-1) != 0))
    tails = np.append(heads[1:], len(events)) - 1
    lengths = lanes.end[events] - lanes.start[events]
    busy = np.add.reduceat(lengths, heads)
    start, end = lanes.start[events[heads]], lanes.end[events[tails]]
    shade = _most(np.repeat(np.arange(len(heads)), tails - heads + 1), lanes.shade[events], lengths)

    grade = np.minimum(busy * CLASSES // np.maximum(end - start, column_ns), CLASSES - 1)
    breaks = (np.diff(lane[heads]) != 0) | (np.diff(column[heads]) > 1) | (np.diff(shade.astype(int)) != 0)
    breaks |= (np.diff(grade) != 0) | (events[heads[1:]] != events[tails[:-1]] + 1)
    runs = np.append(0, np.flatnonzero(breaks) + 1)
    last = np.append(runs[1:], len(heads)) - 1
    count = tails[last] - heads[runs] + 1
    total, extent = np.add.reduceat(busy, runs), end[last] - start[runs]
    return Rectangles(
        lane=lanes.lane[events[heads[runs]]],
        start=start[runs],
        end=end[last],
        shade=shade[runs],
        busy=np.divide(total, extent, out=np.ones(len(runs)), where=extent > 0),
        events=count,
        event=np.where(count == 1, events[heads[runs]], -1),
    )


def _most(cell: Ints, shade: Codes, lengths: Ints) -> Codes:
    """For each cell the shade that takes most of its time."""
    most = 1 << 8  # values of a Codes
    both, of_event = np.unique(cell * most + shade, return_inverse=True)
    time = np.bincount(of_event, weights=lengths + 1)
    order = np.lexsort((time, both // most))
    last = np.append(np.diff(both[order] // most) != 0, True)
    return (both[order][last] % most).astype(np.uint8)
