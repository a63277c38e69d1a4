"""Which part of a trace is asked about: a window of time, names, ranks, devices, streams, or what a range did."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.containment import NONE, on_one_line, tightest
from labkit.nsys.analysis.launches import call_times, first_calls
from labkit.nsys.analysis.projection import full_names
from labkit.nsys.tables.kernel_names import cut
from labkit.nsys.tables.places import rank_of
from labkit.nsys.trace import Trace, TraceError
from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean

MOST_TOLD = 5
OPEN_NS = 1 << 62  # beyond any trace: a window that is open there
WHAT = {"operations": "GPU operations", "calls": "calls", "ranges": "NVTX ranges"}

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Selection:
    """Every field narrows; by default everything is asked about.

    `window_ns` (from, to) on the trace's clock takes what runs at some time of it, however little. `name` and `range`
    are regular expressions that are found anywhere in a name, in upper or lower case. `range` takes the ranges of that
    name ("domain:message"), what lies in them on their thread, and the GPU's work that was launched there.
    """

    window_ns: tuple[int, int] | None = None
    name: str | None = None
    ranks: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    streams: tuple[int, ...] = ()
    range: str | None = None

    def __post_init__(self) -> None:
        if self.window_ns is not None and self.window_ns[0] >= self.window_ns[1]:
            raise UserError(f"got a window from {_told(self.window_ns)}; expected an end after its start")

    def of(self, trace: Trace, frame: str, *, among: Mask | None = None) -> Mask:
        """Which rows of `trace.operations`, `.calls` or `.ranges` are asked about, of those in `among`.

        TraceError where one of the fields leaves nothing of a frame that is not empty: it says what there is.
        """
        rows = getattr(trace, frame)
        kept = np.ones(len(rows), bool) if among is None else among.copy()
        for narrow in (self._by_rank, self._by_place, self._by_range, self._by_window, self._by_name):
            if kept.any():
                kept = narrow(trace, frame, kept)
        return kept

    def _by_rank(self, trace: Trace, frame: str, kept: Mask) -> Mask:
        if not self.ranks:
            return kept
        return _only(rank_of(trace, getattr(trace, frame)), self.ranks, kept, "rank", WHAT[frame])

    def _by_place(self, trace: Trace, frame: str, kept: Mask) -> Mask:
        if frame == "operations":
            for column, wanted in (("device", self.devices), ("stream", self.streams)):
                if wanted and kept.any():
                    kept = _only(trace.operations[column].to_numpy(), wanted, kept, column, WHAT[frame])
        return kept

    def _by_window(self, trace: Trace, frame: str, kept: Mask) -> Mask:
        if self.window_ns is None:
            return kept
        rows, (opens, closes) = getattr(trace, frame), self.window_ns
        start, end = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()
        within = kept & (start < closes) & (np.maximum(end, start + 1) > opens)
        if not within.any():
            first, last = start[kept].min() / 1e6, end[kept].max() / 1e6
            raise TraceError(
                f"got the window {_told(self.window_ns)}, in which no {WHAT[frame][:-1]} runs; expected one within "
                f"{first:.3f} to {last:.3f} ms, where they are"
            )
        return within

    def _by_name(self, trace: Trace, frame: str, kept: Mask) -> Mask:
        if self.name is None:
            return kept
        names = full_names(trace.ranges) if frame == "ranges" else getattr(trace, frame)["name"].array
        left_out = _ranges_of(trace)[1:] if frame == "ranges" else ()
        return kept & _matching(names, self.name, kept, "name", WHAT[frame], *left_out)

    def _by_range(self, trace: Trace, frame: str, kept: Mask) -> Mask:
        if self.range is None:
            return kept
        ranges = trace.ranges
        wanted = _matching(full_names(ranges), self.range, np.ones(len(ranges), bool), "range", *_ranges_of(trace))
        called = frame == "operations"
        inner = call_times(trace, np.arange(len(trace.calls))) if called else getattr(trace, frame)
        outer_line, inner_line = on_one_line([ranges[wanted], inner])
        inside = np.append(tightest(outer_line, inner_line) != NONE, False)
        if frame == "ranges":
            inside[:-1] |= wanted
        kept = kept & (inside[first_calls(trace)] if called else inside[:-1])
        if not kept.any():
            raise TraceError(
                f"got the range {self.range!r}, which {int(wanted.sum())} NVTX ranges match; none of them holds any "
                f"of the {WHAT[frame]} that are left"
            )
        return kept


def _told(window_ns: tuple[int, int]) -> str:
    opens, closes = window_ns
    first = "the start" if opens <= -OPEN_NS else f"{opens / 1e6:g} ms"
    return f"{first} to {'the end' if closes >= OPEN_NS else f'{closes / 1e6:g} ms'}"


def _only(column: NDArray, wanted: tuple[int, ...], kept: Mask, what: str, of: str) -> Mask:
    found = kept & np.isin(column, wanted)
    if not found.any():
        there = np.unique(column[kept])
        told = ", ".join(map(str, there[:20])) + (", ..." if len(there) > 20 else "")
        raise TraceError(f"got {what} {', '.join(map(str, wanted))}, of which there are no {of}; expected of {told}")
    return found


def _ranges_of(trace: Trace) -> tuple[str, str]:
    """What ranges are called, and the notes about ranges that the reader left out."""
    return WHAT["ranges"], "; ".join(line for line in trace.source.skipped if WHAT["ranges"] in line)


def _matching(names: pd.Categorical, pattern: str, kept: Mask, what: str, of: str, left_out: str = "") -> Mask:
    """Which rows have a matching name."""
    try:
        wanted = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise UserError(f"got the {what} {pattern!r}, expected a regular expression ({error})") from None
    matches = np.array([bool(wanted.search(str(name))) for name in names.categories], bool)
    found = np.append(matches, False)[names.codes]
    if not (found & kept).any():
        used, counts = np.unique(names.codes[kept], return_counts=True)
        there = [str(names.categories[code]) for code in used[np.argsort(-counts, kind="stable")] if code >= 0]
        told = ", ".join(repr(cut(each, 60)) for each in there[:MOST_TOLD])
        near = did_you_mean(pattern, there)
        raise TraceError(
            f"got the {what} {pattern!r}{near}, which none of the {len(there)} names of {of} matches; the most "
            f"frequent are {told or 'none'}" + (f". Not among them: {left_out}" if left_out else "")
        )
    return found


EVERYTHING = Selection()
