"""The part of a timeline to show first."""

from __future__ import annotations

from labkit.nsys.analysis.steps import steps
from labkit.nsys.timeline.lanes import Lanes
from labkit.nsys.trace import TraceError
from labkit.stages import Phase

MARGIN = 0.02  # share of the view, on both sides


def view(
    lanes: Lanes, window: tuple[float, float] | None = None, decode_steps: int | range | None = None
) -> tuple[int, int]:
    """Begin and end in nanoseconds from the timeline's zero: all of it, a `window` in milliseconds, or decode steps.

    A number n means the first n steps. Raises TraceError for a window without length, and for steps that a trace lacks.
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
        numbers = range(decode_steps) if isinstance(decode_steps, int) else decode_steps
        edges = [_steps(lanes, at, numbers) for at in range(len(lanes.traces))]
        begin, end = min(first for first, _ in edges), max(last for _, last in edges)
    margin = max(round((end - begin) * MARGIN), 1)
    return begin - margin, end + margin


def _steps(lanes: Lanes, at: int, numbers: range) -> tuple[int, int]:
    """The begin of the first and the end of the last of the chosen decode steps of a trace."""
    decode_steps = steps(lanes.traces[at], lanes.attributions[at])
    decode_steps = decode_steps[decode_steps["phase"] == Phase.DECODE]
    count = int(decode_steps["index"].max()) + 1 if len(decode_steps) else 0
    if not numbers or numbers.step != 1 or numbers.start < 0 or numbers.stop > count:
        range_text = f"{numbers.start} to {numbers.stop - 1}" if numbers else "none"
        raise TraceError(f"got decode steps {range_text} of {lanes.names[at]}; expected some of its {count}, from 0")
    chosen = decode_steps[(decode_steps["index"] >= numbers.start) & (decode_steps["index"] < numbers.stop)]
    begin, end = chosen["range_start_ns"].min(), chosen[["range_end_ns", "end_ns"]].max(axis=None)
    return int(begin) - lanes.zeros_ns[at], int(end) - lanes.zeros_ns[at]
