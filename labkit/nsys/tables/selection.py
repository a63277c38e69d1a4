"""Selections of a part of a trace: a window of time, names, ranks, devices, streams, or the work of a range."""

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

MOST_LISTED = 5
OPEN_NS = 1 << 62  # beyond any trace: the bound of a window that is open at this end
NVTX = "NVTX ranges"  # in notes of the reader about ranges that it left out
NOUNS = {"operations": "GPU operations", "calls": "calls", "ranges": "ranges"}

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Selection:
    """A part of a trace. Every field narrows it; by default it is all of the trace.

    `name` and `range` are regular expressions that may match anywhere in a name, in upper or lower case.
    """

    window_ns: tuple[int, int] | None = None  # (from, to) on the trace's clock: rows that run at some time in it
    name: str | None = None
    ranks: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    streams: tuple[int, ...] = ()
    # ranges of this name ("domain:message"), everything in them on their thread, and the GPU work launched in them
    range: str | None = None

    def __post_init__(self) -> None:
        if self.window_ns is not None and self.window_ns[0] >= self.window_ns[1]:
            raise UserError(f"got a window from {_window_text(self.window_ns)}; expected an end after its start")

    def of(self, trace: Trace, frame: str, *, among: Mask | None = None) -> Mask:
        """Whether each row of `trace.operations`, `.calls` or `.ranges` is selected, among the rows of `among`.

        TraceError if a field leaves nothing of a frame that is not empty. Its message names the possible values.
        """
        rows = getattr(trace, frame)
        kept = np.ones(len(rows), bool) if among is None else among.copy()
        for narrow in (self._by_rank, self._by_place, self._by_range, self._by_window, self._by_name):
            if kept.any():
                kept = narrow(trace, frame, kept)
        return kept

    def rows(self, trace: Trace, frame: str, *kinds: str) -> pd.DataFrame:
        """The selected rows of a frame, of these `kinds`; without any, of every kind. TraceError as in `of`."""
        rows: pd.DataFrame = getattr(trace, frame)
        return rows[self.of(trace, frame, among=rows["kind"].isin(kinds).to_numpy() if kinds else None)]

    def _by_rank(self, trace: Trace, frame: str, kept: Mask) -> Mask:
        if not self.ranks:
            return kept
        return _only(rank_of(trace, getattr(trace, frame)), self.ranks, kept, "rank", NOUNS[frame])

    def _by_place(self, trace: Trace, frame: str, kept: Mask) -> Mask:
        if frame == "operations":
            for column, numbers in (("device", self.devices), ("stream", self.streams)):
                if numbers and kept.any():
                    kept = _only(trace.operations[column].to_numpy(), numbers, kept, column, NOUNS[frame])
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
                f"got the window {_window_text(self.window_ns)}, in which no {NOUNS[frame][:-1]} runs; expected a "
                f"window within {first:.3f} to {last:.3f} ms"
            )
        return within

    def _by_name(self, trace: Trace, frame: str, kept: Mask) -> Mask:
        if self.name is None:
            return kept
        names = full_names(trace.ranges) if frame == "ranges" else getattr(trace, frame)["name"].array
        left_out = _ranges_of(trace)[1:] if frame == "ranges" else ()
        return kept & _matching(names, self.name, kept, "name", NOUNS[frame], *left_out)

    def _by_range(self, trace: Trace, frame: str, kept: Mask) -> Mask:
        if self.range is None:
            return kept
        ranges = trace.ranges
        matches = _matching(full_names(ranges), self.range, np.ones(len(ranges), bool), "range", *_ranges_of(trace))
        called = frame == "operations"
        inner = call_times(trace, np.arange(len(trace.calls))) if called else getattr(trace, frame)
        outer_line, inner_line = on_one_line([ranges[matches], inner])
        inside = np.append(tightest(outer_line, inner_line) != NONE, False)
        if frame == "ranges":
            inside[:-1] |= matches
        kept = kept & (inside[first_calls(trace)] if called else inside[:-1])
        if not kept.any():
            raise TraceError(
                f"got the range {self.range!r}, which {int(matches.sum())} ranges match; none of them holds any "
                f"of the selected {NOUNS[frame]}"
            )
        return kept


def _window_text(window_ns: tuple[int, int]) -> str:
    opens, closes = window_ns
    first = "the start" if opens <= -OPEN_NS else f"{opens / 1e6:g} ms"
    return f"{first} to {'the end' if closes >= OPEN_NS else f'{closes / 1e6:g} ms'}"


def _only(column: NDArray, numbers: tuple[int, ...], kept: Mask, field: str, noun: str) -> Mask:
    selected = kept & np.isin(column, numbers)
    if not selected.any():
        present = np.unique(column[kept])
        listing = ", ".join(map(str, present[:20])) + (", ..." if len(present) > 20 else "")
        raise TraceError(f"got {field} {', '.join(map(str, numbers))}, which has no {noun}; expected one of {listing}")
    return selected


def _ranges_of(trace: Trace) -> tuple[str, str]:
    """The word for ranges, and the notes about ranges that the reader left out."""
    return NOUNS["ranges"], "; ".join(line for line in trace.source.skipped if NVTX in line)


def _matching(names: pd.Categorical, pattern: str, kept: Mask, field: str, noun: str, left_out: str = "") -> Mask:
    """Whether each row has a matching name."""
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise UserError(f"got the {field} {pattern!r}, expected a regular expression ({error})") from None
    matches = np.array([bool(expression.search(str(name))) for name in names.categories], bool)
    matched = np.append(matches, False)[names.codes]
    if not (matched & kept).any():
        used, counts = np.unique(names.codes[kept], return_counts=True)
        present = [str(names.categories[code]) for code in used[np.argsort(-counts, kind="stable")] if code >= 0]
        listing = ", ".join(repr(cut(name, 60)) for name in present[:MOST_LISTED])
        near = did_you_mean(pattern, present)
        raise TraceError(
            f"got the {field} {pattern!r}{near}, which none of the {len(present)} names of {noun} matches; the most "
            f"frequent are {listing or 'none'}" + (f". Not among them: {left_out}" if left_out else "")
        )
    return matched


EVERYTHING = Selection()
