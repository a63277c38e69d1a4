"""Which part of a timeline to show first."""

from __future__ import annotations

from labkit.nsys.analysis.steps import steps
from labkit.nsys.timeline.lanes import Lanes
from labkit.nsys.trace import TraceError
from labkit.stages import Phase

MARGIN = 0.02  # of the view, on both sides


def view(
    lanes: Lanes, window: tuple[float, float] | None = None, decode_steps: int | range | None = None
) -> tuple[int, int]:
    """Begin and end in nanoseconds from the timeline's zero: all of it, a `window` in milliseconds, or decode steps.

    A number of steps means the first ones. Raises TraceError for a window without length, and for steps that are not
    in every trace.
    """
    if window is not None and decode_steps is not None:
        raise TraceError("got a window and steps; expected one of them")
    begin, end = lanes.span
    if window is not None:
        begin, end = (round(edge * 1e6) for edge in window)
        if begin >= end:
            raise TraceError(f"got window {window}; expected its begin and its later end in milliseconds")
        return begin, end
    if decode_steps is not None:
        wanted = range(decode_steps) if isinstance(decode_steps, int) else decode_steps
        edges = [_steps(lanes, at, wanted) for at in range(len(lanes.traces))]
        begin, end = min(first for first, _ in edges), max(last for _, last in edges)
    margin = max(round((end - begin) * MARGIN), 1)
    return begin - margin, end + margin


def _steps(lanes: Lanes, at: int, wanted: range) -> tuple[int, int]:
    """When the first and the last of the wanted decode steps of a trace begin and end."""
    found = steps(lanes.traces[at], lanes.attributions[at])
    found = found[found["phase"] == Phase.DECODE]
    count = int(found["index"].max()) + 1 if len(found) else 0
    if not wanted or wanted.step != 1 or wanted.start < 0 or wanted.stop > count:
        asked = f"{wanted.start} to {wanted.stop - 1}" if wanted else "none"
        raise TraceError(f"got decode steps {asked} of {lanes.names[at]}; expected some of its {count}, from 0")
    chosen = found[(found["index"] >= wanted.start) & (found["index"] < wanted.stop)]
    begin, end = chosen["range_start_ns"].min(), chosen[["range_end_ns", "end_ns"]].max(axis=None)
    return int(begin) - lanes.zeros_ns[at], int(end) - lanes.zeros_ns[at]
