"""The lanes of a timeline: rows for the events of one trace or several, in which no two events overlap.

From top to bottom: trace, process, CPU thread (ranges by nesting, operators of PyTorch, CUDA calls), GPU stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.attribution import Attribution, attribute
from labkit.nsys.analysis.nesting import stable_order
from labkit.nsys.arrays import Ints
from labkit.nsys.tables.bare_names import without_numbers
from labkit.nsys.timeline.shades import CODE, OTHER, SHADES, Codes, first_decode_step, has_labels
from labkit.nsys.timeline.strips import FRAMES, MAX_LEVELS, Strip, strips_of
from labkit.nsys.trace import Trace, TraceError

EVENTS = {  # arrays of `Lanes` with an element for each event
    "start": np.int64, "end": np.int64, "lane": np.int32, "shade": np.uint8, "name": np.int32, "source": np.uint16,
    "row": np.int32,
}  # fmt: skip
MOST_COLOURED = 6  # names of ranges
Traces = Trace | Mapping[str, Trace] | Sequence[Trace]


@dataclass(frozen=True)
class Lanes:
    """The events by lane, and within a lane by time. The number of an event is its position in these arrays.

    Times are nanoseconds from the zero of each trace: the start of its first decode step, if all traces have one.
    """

    names: tuple[str, ...]  # of the traces
    traces: tuple[Trace, ...]
    zeros_ns: tuple[int, ...]  # on each trace's own clock
    aligned: str  # the meaning of the zeros, in words
    strips: tuple[Strip, ...]
    start: Ints
    end: Ints
    lane: NDArray[np.int32]
    shade: Codes  # row of `shades`
    name: NDArray[np.int32]  # row of `texts`
    texts: NDArray[np.object_]
    shades: tuple[str, ...]  # SHADES, and the ranges that are coloured by their names
    text_source: NDArray[np.uint16]  # of each text, as `source`
    source: NDArray[np.uint16]  # trace * len(FRAMES) + position in FRAMES
    row: NDArray[np.int32]  # of this frame
    attributions: tuple[Attribution | None, ...]  # None for a trace without CUDA graphs, where calls have the stages
    left_out: int  # number of events that are nested too deep

    def __len__(self) -> int:
        return len(self.start)

    @property
    def count(self) -> int:
        """The number of lanes."""
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

    def events_of(self, trace: int, frame: str) -> Ints:
        """The event of each row of a trace's frame; -1 for a row that was left out."""
        return self._places[trace * len(FRAMES) + FRAMES.index(frame)]


def named_traces(traces: Traces) -> dict[str, Trace]:
    """Traces by their names in a figure. Raises TraceError without any."""
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
    """The lanes of some traces. Raises TraceError if a trace has nothing to draw."""
    named = named_traces(traces)
    for name, trace in named.items():
        if not any(len(getattr(trace, frame)) for frame in FRAMES):
            raise TraceError(f"got {name} without ranges, calls or GPU operations; expected a trace with some of them")
    steps = [first_decode_step(trace) for trace in named.values()]
    attributions = [attribute(trace) if len(trace.graph_nodes) else None for trace in named.values()]
    strips: list[Strip] = []
    columns: dict[str, list[NDArray]] = {name: [] for name in (*EVENTS, "texts", "text_source")}
    zeros: list[int] = []
    left_out = 0
    for at, (trace, step) in enumerate(zip(named.values(), steps, strict=True)):
        trace_strips, pieces = strips_of(at, trace, attributions[at], sum(strip.lanes for strip in strips))
        strips += trace_strips
        if step is not None and None not in steps:
            zeros.append(step)
        else:  # a single trace keeps its own clock, on which `labkit trace` shows times
            zeros.append(0 if len(named) == 1 else min(_starts(trace)))
        for piece in pieces:
            source = at * len(FRAMES) + piece.frame
            before = sum(len(texts) for texts in columns["texts"])
            kept = piece.level < MAX_LEVELS
            of_piece = {
                "start": piece.start - zeros[-1], "end": piece.end - zeros[-1], "lane": piece.lane,
                "shade": piece.shade, "name": piece.names.codes.astype(np.int32) + before,
                "source": np.full(len(kept), source), "row": np.arange(len(kept)),
            }  # fmt: skip
            for name, column in of_piece.items():
                columns[name].append(column[kept])
            columns["texts"].append(piece.names.categories.to_numpy(dtype=object))
            columns["text_source"].append(np.full(len(piece.names.categories), source, np.uint16))
            left_out += int((~kept).sum())
    order = stable_order(np.concatenate(columns["lane"]))
    events = {name: np.concatenate(columns[name])[order].astype(dtype, copy=False) for name, dtype in EVENTS.items()}
    texts = np.concatenate(columns["texts"])
    plain = [at for at, trace in enumerate(named.values()) if not has_labels(trace)]
    events["shade"], coloured = _coloured_by_name(events, texts, plain)
    return Lanes(
        names=tuple(named),
        traces=tuple(named.values()),
        zeros_ns=tuple(zeros),
        aligned="start of the capture" if None in steps else "first decode step",
        strips=tuple(strips),
        **events,
        texts=texts,
        shades=(*SHADES, *coloured),
        text_source=np.concatenate(columns["text_source"]),
        attributions=tuple(attributions),
        left_out=left_out,
    )


def _starts(trace: Trace) -> list[int]:
    frames = (getattr(trace, name) for name in FRAMES)
    return [int(frame["start_ns"].min()) for frame in frames if len(frame)]


def _coloured_by_name(
    events: Mapping[str, NDArray], texts: NDArray[np.object_], traces: Sequence[int]
) -> tuple[Codes, list[str]]:
    """The shades of the events, and the names of ranges that have a shade of their own.

    These are the names with the most time among the ranges in `traces` that belong to no family.
    """
    trace, frame = np.divmod(events["source"], len(FRAMES))
    ranges = (frame == FRAMES.index("ranges")) & np.isin(trace, traces) & (events["shade"] == CODE[OTHER])
    rows = np.flatnonzero(ranges)
    codes, categories = pd.factorize(texts)
    own_names = pd.Categorical.from_codes(codes[events["name"][rows]], pd.Index(categories, dtype="str"))
    bare = np.asarray(without_numbers(own_names, events["lane"][rows]).astype(str), object)
    names, of_row = np.unique(bare.astype(str), return_inverse=True)
    time = np.bincount(of_row, weights=(events["end"] - events["start"])[rows], minlength=len(names))
    most = np.argsort(-time, kind="stable")[:MOST_COLOURED]
    code = np.full(len(names), CODE[OTHER])
    code[most] = len(SHADES) + np.arange(len(most))
    shade = events["shade"].copy()
    shade[rows] = code[of_row]
    return shade, [str(names[place]) for place in most]
