"""All events of a timeline as bytes that compress well, for a page that has no Python to ask.

A column of whole numbers is written as planes: the lowest byte of every number, then the next byte of every number, as
many planes as the largest number has bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.nsys.analysis.launches import first_calls
from labkit.nsys.arrays import Ints
from labkit.nsys.timeline.events import facts, kind, label
from labkit.nsys.timeline.lanes import Lanes
from labkit.nsys.timeline.strips import FRAMES
from labkit.nsys.trace import Trace
from labkit.stages import DOMAIN, parse

TOLD_BY = {  # the columns of a frame that decide what is said about an event, apart from its name and place
    "ranges": ("domain", "style", "open"),
    "calls": ("kind",),
    "operations": ("kind", "grid", "block", "registers", "shared_bytes", "bytes", "graph_node"),
}


def pack(lanes: Lanes) -> tuple[dict[str, Any], bytes]:
    """The header, in types that JSON has, and the planes of its columns, one after the other.

    Columns, of which each event has a number: gap (from the end of the event before it in its lane, or from the start
    of all), length, name (of `texts`), shade, about (of `abouts`), call (the event that launched it, + 1; 0: none),
    owner (the range that it belongs to through a CUDA graph, + 1; 0: none). "change": the difference to the number
    before, twice that, or less than zero twice its size - 1.
    """
    used, name = np.unique(lanes.name, return_inverse=True)
    about, abouts = _abouts(lanes)
    call, owner = _linked(lanes)
    before = np.concatenate([[lanes.span[0]], lanes.end[:-1]])
    before[lanes.bounds[:-1]] = lanes.span[0]
    columns = {
        "gap": lanes.start - before, "length": lanes.end - lanes.start, "name": name, "shade": lanes.shade,
        "about": about, "call": _changes(call), "owner": _changes(owner),
    }  # fmt: skip
    planes = {each: _planes(column) for each, column in columns.items()}
    texts = [str(lanes.texts[each]) for each in used]
    shorts = [label(lanes, int(each)) for each in used]
    known = {
        at: [found.phase.value, found.layer, found.stage and found.stage.value]
        for at, text in enumerate(texts)
        if (found := parse(text))
    }
    header = {
        "events": len(lanes),
        "counts": np.diff(lanes.bounds).tolist(),
        "columns": {each: len(bytes_) // len(lanes) for each, bytes_ in planes.items()},
        "texts": texts,
        "shorts": {at: short for at, (text, short) in enumerate(zip(texts, shorts, strict=True)) if short != text},
        "labels": known,
        "abouts": abouts,
        "domain": DOMAIN,
    }
    return header, b"".join(planes.values())


def _planes(column: Ints) -> bytes:
    numbers = column.astype("<u8")
    count = max((int(numbers.max()).bit_length() + 7) // 8, 1)
    return np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, 8)[:, :count].T).tobytes()


def _changes(column: Ints) -> Ints:
    changes = np.diff(column, prepend=0)
    return np.where(changes < 0, -2 * changes - 1, 2 * changes)


def _abouts(lanes: Lanes) -> tuple[Ints, list[dict[str, Any]]]:
    """What is said about each event beside its name and place, as a number of the list."""
    numbers = np.zeros(len(lanes), np.int64)
    abouts: list[dict[str, Any]] = []
    for source in np.unique(lanes.source):
        at, number = divmod(int(source), len(FRAMES))
        trace, frame = lanes.traces[at], FRAMES[number]
        events = np.flatnonzero(lanes.source == source)
        rows = lanes.row[events]
        deciding = (
            getattr(trace, frame)[list(TOLD_BY[frame])].iloc[rows].assign(graph=_by_graph(lanes, at, frame, rows))
        )
        group = deciding.groupby(list(deciding.columns), sort=False, observed=True, dropna=False).ngroup().to_numpy()
        numbers[events] = group + len(abouts)
        for row, graph in zip(*(each[_firsts(group)] for each in (rows, deciding["graph"].to_numpy())), strict=True):
            said = facts(trace, frame, int(row), bool(graph))
            said.pop("correlation", None)
            abouts.append({"kind": kind(trace, frame, int(row)), "facts": said})
    return numbers, abouts


def _firsts(group: Ints) -> Ints:
    """Where each group is first, in the order of the groups."""
    return np.unique(group, return_index=True)[1]


def _by_graph(lanes: Lanes, at: int, frame: str, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
    attribution = lanes.attributions[at]
    if frame != "operations" or attribution is None:
        return np.zeros(len(rows), bool)
    return np.asarray(attribution.how == "graph")[rows]


def _linked(lanes: Lanes) -> tuple[Ints, Ints]:
    call, owner = np.zeros(len(lanes), np.int64), np.zeros(len(lanes), np.int64)
    for at, trace in enumerate(lanes.traces):
        events = np.flatnonzero(lanes.source == at * len(FRAMES) + FRAMES.index("operations"))
        rows = lanes.row[events]
        call[events] = _events(lanes, at, "calls", first_calls(trace)[rows], trace) + 1
        attribution = lanes.attributions[at]
        if attribution is not None:
            by_graph = np.asarray(attribution.how == "graph")[rows]
            of_range = _events(lanes, at, "ranges", attribution.range_of_operation[rows], trace)
            owner[events] = np.where(by_graph, of_range + 1, 0)
    return call, owner


def _events(lanes: Lanes, at: int, frame: str, rows: Ints, trace: Trace) -> Ints:
    """The events of rows of a frame; -1 for rows below 0, and for those that are not in the timeline."""
    places = np.append(lanes.events_of(at, frame), -1)
    return places[np.where(rows < 0, len(getattr(trace, frame)), rows)]
