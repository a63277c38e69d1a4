"""Single events of a timeline: their details and their relations, and searches by place and by text."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from labkit.nsys.arrays import Ints
from labkit.nsys.timeline.lanes import Lanes
from labkit.nsys.timeline.strips import FRAMES
from labkit.nsys.trace import Trace
from labkit.stages import DOMAIN, Label, parse

ARGUMENTS = re.compile(r"<[^<>]*>|\([^()]*\)")
MOST_LINKED = 50
FACTS = {  # of a call or operation; by column: label, format
    "grid": ("grid", ""),
    "block": ("block", ""),
    "registers": ("registers per thread", ""),
    "shared_bytes": ("shared memory per block", ",d"),
    "bytes": ("bytes", ",d"),
    "graph_node": ("graph node", ""),
    "correlation": ("correlation", ""),
}


def short_name(name: str) -> str:
    """A kernel's name without the type of its result, namespaces, template arguments and parameters."""
    bare, before = name.replace("(anonymous namespace)::", ""), ""
    while bare != before:
        bare, before = ARGUMENTS.sub("", bare), bare
    return bare.split("::")[-1].strip().split(" ")[-1] or name


def label(lanes: Lanes, name: int) -> str:
    """The text that a timeline writes on an event with this row of `lanes.texts`."""
    text = str(lanes.texts[name])
    of_operation = FRAMES[lanes.text_source[name] % len(FRAMES)] == "operations"
    return short_name(text) if of_operation else text


def search(lanes: Lanes, text: str) -> Ints:
    """The events whose name contains `text`, in upper or lower case, in the order of their starts."""
    if not text:
        return np.zeros(0, np.int64)
    folded = text.casefold()
    holds = np.fromiter((folded in name.casefold() for name in lanes.texts), bool, len(lanes.texts))
    events = np.flatnonzero(holds[lanes.name])
    return events[np.argsort(lanes.start[events], kind="stable")]


def nearest(lanes: Lanes, lane: int, time: int) -> int:
    """The event of a lane at `time`, or the closest one; -1 in an empty lane."""
    first, beyond = (int(bound) for bound in lanes.bounds[lane : lane + 2])
    if first == beyond:
        return -1
    at = first + int(np.searchsorted(lanes.start[first:beyond], time, side="right"))
    before, after = max(at - 1, first), min(at, beyond - 1)
    return before if time - lanes.end[before] <= lanes.start[after] - time else after


def neighbour(lanes: Lanes, event: int, by: int) -> int:
    """The event `by` positions further in the same lane, or the last one at the lane's end."""
    first, beyond = (int(bound) for bound in lanes.bounds[lanes.lane[event] : lanes.lane[event] + 2])
    return min(max(event + by, first), beyond - 1)


def summary(lanes: Lanes, event: int) -> dict[str, Any]:
    """An event's number, name, place and time, in nanoseconds from the timeline's zero."""
    start, end = int(lanes.start[event]), int(lanes.end[event])
    name = int(lanes.name[event])
    return {
        "event": int(event), "name": str(lanes.texts[name]), "short": label(lanes, name),
        "lane": int(lanes.lane[event]), "start_ns": start, "end_ns": end, "duration_ns": end - start,
    }  # fmt: skip


def details(lanes: Lanes, event: int) -> dict[str, Any]:
    """The details of an event, in types that JSON has. Some of its keys:

    - parents: the ranges around the event, or around the call that launched a GPU operation, the outermost first;
    - linked: the operations of a call, or the call of an operation;
    - stage, layer, phase: None if unknown.
    """
    at, number = divmod(int(lanes.source[event]), len(FRAMES))
    trace, frame, row = lanes.traces[at], FRAMES[number], int(lanes.row[event])
    strip = lanes.strip_of_lane[int(lanes.lane[event])]
    linked, attribution = _linked(trace, frame, row), lanes.attributions[at]
    if frame == "operations":
        parents = _around(trace, "calls", linked[0]) if len(linked) else []
        graph = attribution is not None and attribution.how[row] == "graph"
    else:
        parents, graph = _around(trace, frame, row), False
    if graph and attribution is not None:
        label_of = _label(trace, int(attribution.range_of_operation[row]))
    else:
        inner_first = [*([row] if frame == "ranges" else []), *reversed(parents)]
        label_of = next((known for parent in inner_first if (known := _label(trace, parent))), None)
    linked_frame = "calls" if frame == "operations" else "operations"
    return {
        **summary(lanes, event),
        "kind": kind(trace, frame, row),
        "shade": lanes.shades[lanes.shade[event]],
        "on_gpu": frame == "operations",
        "trace": lanes.names[at],
        "process": process_name(trace, strip.process),
        "thread": strip.label,
        "phase": label_of and label_of.phase.value,
        "layer": label_of and label_of.layer,
        "stage": label_of and label_of.stage and label_of.stage.value,
        "facts": facts(trace, frame, row, graph),
        "parents": _summaries(lanes, at, "ranges", parents),
        "linked": _summaries(lanes, at, linked_frame, linked[:MOST_LINKED]),
    }


def process_name(trace: Trace, process: int) -> str:
    """ "rank 1, python (4001)"."""
    if not 0 <= process < len(trace.processes):
        return f"process {process}"
    names = trace.processes.iloc[process]
    rank = f"rank {names['rank']}, " if names["rank"] >= 0 else ""
    return f"{rank}{names['name'] or 'process'} ({names['pid']})"


def kind(trace: Trace, frame: str, row: int) -> str:
    """The kind of a row of a frame, in words."""
    if frame == "ranges":
        return "range"
    kind = str(getattr(trace, frame)["kind"].iloc[row])
    return {"api": "CUDA call", "op": "operator", "graph": "CUDA graph"}.get(kind, kind)


def facts(trace: Trace, frame: str, row: int, graph: bool) -> dict[str, str]:
    """Further facts about a row of a frame. graph: its stage is known by the creation of a CUDA graph."""
    values = getattr(trace, frame).iloc[row]
    if frame == "ranges":
        known = {"domain": values["domain"], "style": values["style"], "end": "was open" if values["open"] else ""}
    else:
        known = {label: f"{values[name]:{form}}" for name, (label, form) in FACTS.items() if values.get(name)}
        known["stage known by"] = "the making of its CUDA graph" if graph else ""
    return {label: str(fact) for label, fact in known.items() if fact}


def _summaries(lanes: Lanes, at: int, frame: str, rows: Ints | list[int]) -> list[dict[str, Any]]:
    return [summary(lanes, event) for event in lanes.events_of(at, frame)[rows].tolist() if event >= 0]


def _around(trace: Trace, frame: str, row: int) -> list[int]:
    """The ranges around a range or call on its thread, the outermost first."""
    inner, ranges = getattr(trace, frame), trace.ranges
    start, end, process, tid = (inner[name].iat[row] for name in ("start_ns", "end_ns", "process", "tid"))
    starts, ends = ranges["start_ns"].to_numpy(), ranges["end_ns"].to_numpy()
    beyond = int(np.searchsorted(starts, start, side="right"))
    rows = np.flatnonzero(ends[:beyond] >= end)
    rows = rows[(ranges["process"].to_numpy()[rows] == process) & (ranges["tid"].to_numpy()[rows] == tid)]
    if frame == "ranges":
        same = (starts[rows] == start) & (ends[rows] == end)
        rows = rows[(rows != row) & ~(same & (rows > row))]
    return [int(around) for around in rows[np.lexsort((rows, -ends[rows], starts[rows]))]]


def _linked(trace: Trace, frame: str, row: int) -> Ints:
    """Rows of the calls of an operation, or of the operations of a call."""
    if frame == "ranges":
        return np.zeros(0, np.int64)
    own_frame, linked_frame = (
        (trace.operations, trace.calls) if frame == "operations" else (trace.calls, trace.operations)
    )
    correlation, process = own_frame["correlation"].iat[row], own_frame["process"].iat[row]
    same = (linked_frame["correlation"].to_numpy() == correlation) & (linked_frame["process"].to_numpy() == process)
    return np.flatnonzero(same) if correlation else np.zeros(0, np.int64)


def _label(trace: Trace, row: int) -> Label | None:
    ranges = trace.ranges
    return parse(str(ranges["name"].iat[row])) if ranges["domain"].iat[row] == DOMAIN else None
