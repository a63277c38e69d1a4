"""All events of a timeline as bytes that compress well, for a page without Python.

A column of whole numbers is written as planes: the lowest byte of every number, then the next byte of every number, up
to the last byte of the largest number.
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
from labkit.stages import DOMAIN, parse

DECIDED_BY = {  # the columns of a frame that decide the facts about an event, apart from its name and place
    "ranges": ("domain", "style", "open"),
    "calls": ("kind",),
    "operations": ("kind", "grid", "block", "registers", "shared_bytes", "bytes", "graph_node"),
}


def pack(lanes: Lanes) -> tuple[dict[str, Any], bytes]:
    """The header, in types that JSON has, and the planes of its columns, one after the other.

    Columns, with a number for each event:

    - gap: from the end of the previous event in its lane, or from the start of all;
    - length;
    - name: position in `texts`; shade; about: position in `abouts`;
    - call: the event that launched it, + 1; 0: none;
    - owner: the range that it belongs to through a CUDA graph, + 1; 0: none.

    call and owner are written as the change from the event before: twice a rise, or twice a fall less 1.
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
    planes = {column: _planes(numbers) for column, numbers in columns.items()}
    texts = [str(lanes.texts[row]) for row in used]
    shorts = [label(lanes, int(row)) for row in used]
    labels = {
        at: [parsed.phase.value, parsed.layer, parsed.stage and parsed.stage.value]
        for at, text in enumerate(texts)
        if (parsed := parse(text))
    }
    header = {
        "events": len(lanes),
        "counts": np.diff(lanes.bounds).tolist(),
        "columns": {column: len(bytes_) // len(lanes) for column, bytes_ in planes.items()},
        "texts": texts,
        "shorts": {at: short for at, (text, short) in enumerate(zip(texts, shorts, strict=True)) if short != text},
        "labels": labels,
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
    """The facts about each event besides its name and place, as a position in the list."""
    numbers = np.zeros(len(lanes), np.int64)
    abouts: list[dict[str, Any]] = []
    for source in np.unique(lanes.source):
        at, number = divmod(int(source), len(FRAMES))
        trace, frame = lanes.traces[at], FRAMES[number]
        events = np.flatnonzero(lanes.source == source)
        rows = lanes.row[events]
        by_graph = _by_graph(lanes, at, frame, rows)
        deciding = getattr(trace, frame)[list(DECIDED_BY[frame])].iloc[rows].assign(graph=by_graph)
        group = deciding.groupby(list(deciding.columns), sort=False, observed=True, dropna=False).ngroup().to_numpy()
        numbers[events] = group + len(abouts)
        firsts = np.unique(group, return_index=True)[1]  # one event of each group, in the order of the groups
        for row, graph in zip(rows[firsts].tolist(), by_graph[firsts].tolist(), strict=True):
            known = facts(trace, frame, row, graph)
            known.pop("correlation", None)
            abouts.append({"kind": kind(trace, frame, row), "facts": known})
    return numbers, abouts


def _by_graph(lanes: Lanes, at: int, frame: str, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Whether the stage of each row is known by the creation of a CUDA graph."""
    attribution = lanes.attributions[at]
    if frame != "operations" or attribution is None:
        return np.zeros(len(rows), bool)
    return np.asarray(attribution.how == "graph")[rows]


def _linked(lanes: Lanes) -> tuple[Ints, Ints]:
    """The columns call and owner of `pack`."""
    call, owner = np.zeros(len(lanes), np.int64), np.zeros(len(lanes), np.int64)
    for at, trace in enumerate(lanes.traces):
        events = np.flatnonzero(lanes.source == at * len(FRAMES) + FRAMES.index("operations"))
        rows = lanes.row[events]
        call[events] = _events(lanes, at, "calls", first_calls(trace)[rows]) + 1
        attribution = lanes.attributions[at]
        if attribution is not None:
            of_range = _events(lanes, at, "ranges", attribution.range_of_operation[rows])
            owner[events] = np.where(_by_graph(lanes, at, "operations", rows), of_range + 1, 0)
    return call, owner


def _events(lanes: Lanes, at: int, frame: str, rows: Ints) -> Ints:
    """The events of rows of a frame; -1 for row -1, and for rows that are not in the timeline."""
    return np.append(lanes.events_of(at, frame), -1)[rows]
