"""A part of a timeline as a timeline of its own: a window of time, ranks, lanes, or the work of ranges."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from labkit.nsys.arrays import Ints
from labkit.nsys.tables.selection import Selection
from labkit.nsys.timeline.events import process_name
from labkit.nsys.timeline.lanes import Lanes
from labkit.nsys.timeline.strips import FRAMES, Strip
from labkit.nsys.trace import TraceError
from labkit.system.errors import UserError

MOST_LISTED = 12  # lanes


def narrowed(lanes: Lanes, selection: Selection, lane: str | None = None) -> Lanes:
    """The events of `selection` on the threads and streams whose process, name or kind matches `lane`.

    `lane`: a regular expression that may match anywhere, in upper or lower case. The window is on each trace's own
    clock. Raises TraceError if nothing is left. Its message names the possible values.
    """
    kept = _selected(lanes, selection)
    if lane is not None:
        kept &= _in_lanes(lanes, lane, kept)
    return _only(lanes, kept)


def _selected(lanes: Lanes, selection: Selection) -> NDArray[np.bool_]:
    kept = np.zeros(len(lanes), bool)
    refusal: TraceError | None = None
    for at, trace in enumerate(lanes.traces):
        for number, frame in reversed(list(enumerate(FRAMES))):
            events = lanes.source == at * len(FRAMES) + number
            try:
                kept[events] = selection.of(trace, frame)[lanes.row[events]]
            except TraceError as error:  # this frame has no such rows, but another may
                refusal = refusal or error
    if refusal is not None and not kept.any():
        raise refusal
    return kept


def _in_lanes(lanes: Lanes, pattern: str, kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise UserError(f"got the lane {pattern!r}, expected a regular expression ({error})") from None
    names = [_strip_name(lanes, strip) for strip in lanes.strips]
    matches = np.repeat([bool(expression.search(name)) for name in names], [strip.lanes for strip in lanes.strips])
    if not (matches[lanes.lane] & kept).any():
        present = [name for name, strip in zip(names, lanes.strips, strict=True) if _holds(lanes, strip, kept)]
        more = f" and {len(present) - MOST_LISTED} more" if len(present) > MOST_LISTED else ""
        raise TraceError(
            f"got the lane {pattern!r}, which none of the {len(present)} threads and streams matches: "
            f"{'; '.join(present[:MOST_LISTED])}{more}"
        )
    return matches[lanes.lane]


def _strip_name(lanes: Lanes, strip: Strip) -> str:
    place = strip.label if strip.title == strip.label else f"{strip.label}: {strip.title.rpartition(': ')[2]}"
    return f"{process_name(lanes.traces[strip.trace], strip.process)}, {place}"


def _holds(lanes: Lanes, strip: Strip, kept: NDArray[np.bool_]) -> bool:
    first, beyond = lanes.bounds[strip.first], lanes.bounds[strip.first + strip.lanes]
    return bool(kept[first:beyond].any())


def _only(lanes: Lanes, kept: NDArray[np.bool_]) -> Lanes:
    """The lanes with only these events. Lanes that become empty are removed."""
    if kept.all():
        return lanes
    used = np.bincount(lanes.lane[kept], minlength=lanes.count) > 0
    number: Ints = np.cumsum(used) - used
    strips = []
    for strip in lanes.strips:
        count = int(used[strip.first : strip.first + strip.lanes].sum())
        if count:
            strips.append(replace(strip, first=int(number[strip.first]), lanes=count))
    return replace(
        lanes,
        strips=tuple(strips),
        start=lanes.start[kept],
        end=lanes.end[kept],
        lane=number[lanes.lane[kept]].astype(np.int32),
        shade=lanes.shade[kept],
        name=lanes.name[kept],
        source=lanes.source[kept],
        row=lanes.row[kept],
    )
