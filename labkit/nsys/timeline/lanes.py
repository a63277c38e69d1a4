"""The lanes of a timeline: rows for the events of one trace or several, so that no two overlap in a row.

From top to bottom: trace, process, CPU thread (ranges by nesting, operators of PyTorch, CUDA calls), GPU stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from labkit.nsys.analysis.attribution import Attribution, attribute
from labkit.nsys.analysis.nesting import stable_order
from labkit.nsys.arrays import Ints
from labkit.nsys.timeline.shades import Codes, first_decode_step
from labkit.nsys.timeline.strips import FRAMES, MAX_LEVELS, Strip, cut
from labkit.nsys.trace import Trace, TraceError

EVENTS = {
    "start": np.int64, "end": np.int64, "lane": np.int32, "shade": np.uint8, "name": np.int32, "source": np.uint8,
    "row": np.int32,
}  # fmt: skip
Traces = Trace | Mapping[str, Trace] | Sequence[Trace]


@dataclass(frozen=True)
class Lanes:
    """The events by lane, and within a lane by time. The number of an event is its place in these arrays.

    Times are nanoseconds from the zero of each trace: the start of its first decode step, where all have one.
    """

    names: tuple[str, ...]  # of the traces
    traces: tuple[Trace, ...]
    zeros_ns: tuple[int, ...]  # on each trace's own clock
    aligned: str  # what the zeros are, in words
    strips: tuple[Strip, ...]
    start: Ints
    end: Ints
    lane: NDArray[np.int32]
    shade: Codes  # row of SHADES
    name: NDArray[np.int32]  # row of `texts`
    texts: NDArray[np.object_]
    text_source: Codes  # of each text, as `source` below
    source: Codes  # trace * len(FRAMES) + row of FRAMES
    row: NDArray[np.int32]  # of that frame
    attributions: tuple[Attribution | None, ...]  # of traces with CUDA graphs; else the calls tell
    left_out: int

    def __len__(self) -> int:
        return len(self.start)

    @property
    def count(self) -> int:
        """Of lanes."""
        return self.strips[-1].first + self.strips[-1].lanes

    @cached_property
    def span(self) -> tuple[int, int]:
        return int(self.start.min()), int(self.end.max())

    @cached_property
    def bounds(self) -> Ints:
        """The first event of each lane, and at the end the number of events."""
        return np.searchsorted(self.lane, np.arange(self.count + 1))

    @cached_property
    def strip_of_lane(self) -> list[Strip]:
        return [strip for strip in self.strips for _ in range(strip.lanes)]

    @cached_property
    def _places(self) -> dict[int, Ints]:
        places = {}
        for source in range(len(self.traces) * len(FRAMES)):
            trace, frame = divmod(source, len(FRAMES))
            events = np.flatnonzero(self.source == source)
            places[source] = np.full(len(getattr(self.traces[trace], FRAMES[frame])), -1)
            places[source][self.row[events]] = events
        return places

    def event_of(self, trace: int, frame: str, row: int) -> int:
        """The event that a row of a trace's frame became; -1 where it was left out."""
        return int(self._places[trace * len(FRAMES) + FRAMES.index(frame)][row])


def named_traces(traces: Traces) -> dict[str, Trace]:
    """Traces by the names that a figure gives them. Raises TraceError where there is none."""
    if isinstance(traces, Mapping):
        named = dict(traces)
    else:
        several = [traces] if isinstance(traces, Trace) else list(traces)
        names = [", ".join(trace.source.files) or trace.source.profiler for trace in several]
        distinct = len(set(names)) == len(names)
        labels = [name if distinct else f"{name} ({at})" for at, name in enumerate(names, 1)]
        named = dict(zip(labels, several, strict=True))
    if not named:
        raise TraceError("got no trace; expected one, or several as a list or by name")
    return named


def build_lanes(traces: Traces) -> Lanes:
    """The lanes of some traces. Raises TraceError where a trace has nothing to draw."""
    named = named_traces(traces)
    for name, trace in named.items():
        if not any(len(getattr(trace, frame)) for frame in FRAMES):
            raise TraceError(f"got {name} without ranges, calls or GPU operations; expected a trace with some of them")
    steps = [first_decode_step(trace) for trace in named.values()]
    attributions = [attribute(trace) if len(trace.graph_nodes) else None for trace in named.values()]
    strips: list[Strip] = []
    columns: dict[str, list[NDArray]] = {name: [] for name in (*EVENTS, "texts", "text_source", "kept")}
    zeros: list[int] = []
    for at, (trace, step) in enumerate(zip(named.values(), steps, strict=True)):
        found, pieces = cut(at, trace, attributions[at], sum(strip.lanes for strip in strips))
        strips += found
        zeros.append(step if step is not None and None not in steps else min(_starts(trace)))
        for piece in pieces:
            source = at * len(FRAMES) + piece.frame
            texts = sum(len(each) for each in columns["texts"])
            kept = piece.level < MAX_LEVELS
            of_piece = {
                "start": piece.start - zeros[-1], "end": piece.end - zeros[-1], "lane": piece.lane,
                "shade": piece.shade, "name": piece.names.codes.astype(np.int32) + texts,
                "source": np.full(len(kept), source), "row": np.arange(len(kept)),
            }  # fmt: skip
            for name, column in of_piece.items():
                columns[name].append(column[kept])
            columns["texts"].append(piece.names.categories.to_numpy(dtype=object))
            columns["text_source"].append(np.full(len(piece.names.categories), source, np.uint8))
            columns["kept"].append(kept)
    order = stable_order(np.concatenate(columns["lane"]))
    events = {name: np.concatenate(columns[name])[order].astype(dtype, copy=False) for name, dtype in EVENTS.items()}
    return Lanes(
        names=tuple(named),
        traces=tuple(named.values()),
        zeros_ns=tuple(zeros),
        aligned="start of the capture" if None in steps else "first decode step",
        strips=tuple(strips),
        **events,
        texts=np.concatenate(columns["texts"]),
        text_source=np.concatenate(columns["text_source"]),
        attributions=tuple(attributions),
        left_out=int((~np.concatenate(columns["kept"])).sum()),
    )


def _starts(trace: Trace) -> list[int]:
    frames = (getattr(trace, name) for name in FRAMES)
    return [int(frame["start_ns"].min()) for frame in frames if len(frame)]
