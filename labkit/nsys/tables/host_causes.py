"""The CPU's activity while a device waited for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.containment import NONE, numbered, on_one_line, runs, tightest
from labkit.nsys.analysis.projection import full_names
from labkit.nsys.arrays import Ints
from labkit.nsys.trace import Trace

SYNCHRONISED, ALLOCATED, CALLED, HOST = "synchronisation", "allocation", "other CUDA calls", "host code"
HOST_CAUSES = (SYNCHRONISED, ALLOCATED, CALLED, HOST)
KINDS = (re.compile(r"Synchronize|Memcpy(?!.*Async)"), re.compile(r"Malloc|Free|Alloc|HostRegister|MemCreate|MemMap"))
MOST_NAMED = 100_000


@dataclass(frozen=True)
class HostCauses:
    """For each stretch of time its cause, and the call or range that names the cause."""

    cause: Ints  # position in HOST_CAUSES
    of_calls: NDArray[np.bool_]  # whether the name is a call's, else a range's
    call: Ints  # code of the call's name; NONE: no name
    range: Ints  # code of the range's name in `full_names`; NONE: no name


class Texts:
    """The names of calls and of ranges as the categories of one column. Code 0 is "", for a missing name."""

    def __init__(self, calls: Sequence[str], ranges: Sequence[str]) -> None:
        texts = np.array(["", *map(str, calls), *map(str, ranges)], object)
        self._codes, self._texts = pd.factorize(texts)
        self._calls = len(calls)

    def codes(self, of_calls: NDArray[np.bool_] | bool, call: Ints, range_: Ints | int) -> Ints:
        place = np.where(
            of_calls, np.where(call == NONE, 0, call + 1), np.where(range_ == NONE, 0, range_ + 1 + self._calls)
        )
        return self._codes[place]

    def categorical(self, codes: Ints) -> pd.Categorical:
        return pd.Categorical.from_codes(codes, pd.Index(self._texts, dtype="str"))


def host_causes(trace: Trace, begins: Ints, until: Ints, call: Ints) -> HostCauses:
    """The activity of the thread of each call (row of `trace.calls`) from `begins` to `until`.

    The cause is synchronisation if a waiting call is open at the beginning. Otherwise it is the activity with the most
    time: waiting, allocating, other calls of CUDA, or no call. Its name is the longest call of this kind. Without a
    call, it is the innermost range or operator around the whole stretch, for the MOST_NAMED longest stretches.
    """
    causes = HostCauses(
        np.full(len(begins), HOST_CAUSES.index(HOST)), np.zeros(len(begins), bool), *np.full((2, len(begins)), NONE)
    )
    stretches = np.flatnonzero(until > begins)
    if not len(stretches):
        return causes
    gap, row, overlap = _overlaps(trace, begins, until, call, stretches)
    names = trace.calls["name"].cat
    kinds = np.array([_kind(str(name)) for name in names.categories], np.int64)
    kind = kinds[names.codes.to_numpy()[row]]
    start, end = (trace.calls[name].to_numpy()[row] for name in ("start_ns", "end_ns"))
    waits = (kind == 0) & (start <= begins[gap]) & (end >= begins[gap])
    spent = np.stack([np.bincount(gap[kind == at], overlap[kind == at], len(begins)) for at in range(3)], axis=1)
    cause = np.column_stack([spent, until - begins - spent.sum(axis=1)]).argmax(axis=1)
    cause[gap[waits]] = HOST_CAUSES.index(SYNCHRONISED)
    causes.cause[stretches] = cause[stretches]
    order = np.lexsort((overlap, waits))  # the longest call last, waiting calls after all others
    fits = order[kind[order] == cause[gap[order]]]
    causes.call[gap[fits]] = names.codes.to_numpy()[row[fits]]
    causes.of_calls[gap[fits]] = True
    unnamed = stretches[causes.call[stretches] == NONE]
    longest = unnamed[np.argsort(begins[unnamed] - until[unnamed], kind="stable")[:MOST_NAMED]]
    _name_by_ranges(trace, begins, until, call, longest, causes)
    return causes


def _kind(name: str) -> int:
    return next((at for at, pattern in enumerate(KINDS) if pattern.search(name)), len(KINDS))


def _overlaps(trace: Trace, begins: Ints, until: Ints, call: Ints, stretches: Ints) -> tuple[Ints, Ints, Ints]:
    """The overlaps of stretches with outermost API calls of their threads: stretch, row of the call, nanoseconds."""
    api = np.flatnonzero((trace.calls["kind"] == "api").to_numpy())
    rows = trace.calls.iloc[api]
    of_call, of_launch = numbered([rows, trace.calls.iloc[call[stretches]]], "tid")
    order = np.lexsort((rows["start_ns"].to_numpy(), of_call))
    columns = (rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy(), of_call)
    start, end, thread = (column[order] for column in columns)
    reach = int(max(end.max(initial=0), until.max(initial=0))) + 1
    key = thread * reach
    outer = np.ones(len(order), bool)
    outer[1:] = (key + end)[1:] > np.maximum.accumulate(key + end)[:-1]
    start, end, key, order = start[outer], end[outer], key[outer], order[outer]
    low = np.searchsorted(key + end, of_launch * reach + begins[stretches], side="left")
    high = np.searchsorted(key + start, of_launch * reach + until[stretches], side="left")
    index, place = runs(low, np.maximum(high, low))
    gap = stretches[index]
    overlap = np.minimum(end[place], until[gap]) - np.maximum(start[place], begins[gap])
    return gap, api[order[place]], np.maximum(overlap, 0)


def _name_by_ranges(
    trace: Trace, begins: Ints, until: Ints, call: Ints, stretch_rows: Ints, causes: HostCauses
) -> None:
    """Writes into `causes` the innermost range or operator of the launching thread around each of `stretch_rows`."""
    operators = trace.calls[(trace.calls["kind"] == "op").to_numpy()]
    columns = ["start_ns", "end_ns", "process", "tid"]
    named = pd.concat([trace.ranges[columns], operators[columns]], ignore_index=True)
    stretches = (
        trace.calls[["process", "tid"]]
        .iloc[call[stretch_rows]]
        .assign(start_ns=begins[stretch_rows], end_ns=until[stretch_rows])
    )
    row = tightest(*on_one_line([named, stretches]))
    of_operator = row >= len(trace.ranges)
    operator_codes = np.append(operators["name"].cat.codes.to_numpy(np.int64), NONE)
    range_codes = np.append(full_names(trace.ranges).codes.astype(np.int64), NONE)
    causes.of_calls[stretch_rows] = of_operator
    causes.call[stretch_rows] = operator_codes[np.where(of_operator, row - len(trace.ranges), NONE)]
    causes.range[stretch_rows] = range_codes[np.where(of_operator, NONE, row)]
