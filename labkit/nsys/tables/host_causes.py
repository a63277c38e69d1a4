"""What the CPU did while a device waited for it."""

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
    """For each stretch of time the place of its cause in HOST_CAUSES, and what it is named by: codes of the names of
    calls, or, where `of_calls` is false, of ranges, as `full_names` has them; NONE where there is no name.
    """

    cause: Ints
    of_calls: NDArray[np.bool_]
    call: Ints
    range: Ints


class Texts:
    """The names of calls and of ranges as the categories of one column. Code 0 is "", for what has no name."""

    def __init__(self, calls: Sequence[str], ranges: Sequence[str]) -> None:
        every = np.array(["", *map(str, calls), *map(str, ranges)], object)
        self._codes, self._texts = pd.factorize(every)
        self._calls = len(calls)

    def codes(self, of_calls: NDArray[np.bool_] | bool, call: Ints, range_: Ints | int) -> Ints:
        place = np.where(
            of_calls, np.where(call == NONE, 0, call + 1), np.where(range_ == NONE, 0, range_ + 1 + self._calls)
        )
        return self._codes[place]

    def categorical(self, codes: Ints) -> pd.Categorical:
        return pd.Categorical.from_codes(codes, pd.Index(self._texts, dtype="str"))


def host_causes(trace: Trace, begins: Ints, until: Ints, call: Ints) -> HostCauses:
    """What the thread of each call (row of `trace.calls`) did from `begins` to `until`.

    It waited for the GPU if it was in a call that does so at the beginning, else it did what took most of the time:
    waiting, allocating, other calls of CUDA, or no call. Named by the longest call of the kind; without one, by the
    innermost range or operator around the whole stretch, which is looked for of the MOST_NAMED longest stretches.
    """
    found = HostCauses(
        np.full(len(begins), HOST_CAUSES.index(HOST)), np.zeros(len(begins), bool), *np.full((2, len(begins)), NONE)
    )
    held = np.flatnonzero(until > begins)
    if not len(held):
        return found
    gap, row, overlap = _overlaps(trace, begins, until, call, held)
    names = trace.calls["name"].cat
    kinds = np.array([_kind(str(name)) for name in names.categories], np.int64)
    kind = kinds[names.codes.to_numpy()[row]]
    start, end = (trace.calls[name].to_numpy()[row] for name in ("start_ns", "end_ns"))
    waits = (kind == 0) & (start <= begins[gap]) & (end >= begins[gap])
    spent = np.stack([np.bincount(gap[kind == at], overlap[kind == at], len(begins)) for at in range(3)], axis=1)
    cause = np.column_stack([spent, until - begins - spent.sum(axis=1)]).argmax(axis=1)
    cause[gap[waits]] = HOST_CAUSES.index(SYNCHRONISED)
    found.cause[held] = cause[held]
    order = np.lexsort((overlap, waits))  # the longest last, and those in which the thread waited after all others
    fits = order[kind[order] == cause[gap[order]]]
    found.call[gap[fits]] = names.codes.to_numpy()[row[fits]]
    found.of_calls[gap[fits]] = True
    unnamed = held[found.call[held] == NONE]
    longest = unnamed[np.argsort(begins[unnamed] - until[unnamed], kind="stable")[:MOST_NAMED]]
    _name_by_ranges(trace, begins, until, call, longest, found)
    return found


def _kind(name: str) -> int:
    return next((at for at, pattern in enumerate(KINDS) if pattern.search(name)), len(KINDS))


def _overlaps(trace: Trace, begins: Ints, until: Ints, call: Ints, held: Ints) -> tuple[Ints, Ints, Ints]:
    """All (stretch, row of an API call of its thread that runs in it, for how long): outermost calls only."""
    api = np.flatnonzero((trace.calls["kind"] == "api").to_numpy())
    rows = trace.calls.iloc[api]
    of_call, of_launch = numbered([rows, trace.calls.iloc[call[held]]], "tid")
    order = np.lexsort((rows["start_ns"].to_numpy(), of_call))
    start, end, thread = (each[order] for each in (rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy(), of_call))
    reach = int(max(end.max(initial=0), until.max(initial=0))) + 1
    key = thread * reach
    outer = np.ones(len(order), bool)
    outer[1:] = (key + end)[1:] > np.maximum.accumulate(key + end)[:-1]
    start, end, key, order = start[outer], end[outer], key[outer], order[outer]
    low = np.searchsorted(key + end, of_launch * reach + begins[held], side="left")
    high = np.searchsorted(key + start, of_launch * reach + until[held], side="left")
    which, place = runs(low, np.maximum(high, low))
    gap = held[which]
    overlap = np.minimum(end[place], until[gap]) - np.maximum(start[place], begins[gap])
    return gap, api[order[place]], np.maximum(overlap, 0)


def _name_by_ranges(trace: Trace, begins: Ints, until: Ints, call: Ints, which: Ints, found: HostCauses) -> None:
    """Notes the innermost range or operator of the launching thread around each of some stretches."""
    operators = trace.calls[(trace.calls["kind"] == "op").to_numpy()]
    columns = ["start_ns", "end_ns", "process", "tid"]
    named = pd.concat([trace.ranges[columns], operators[columns]], ignore_index=True)
    stretches = trace.calls[["process", "tid"]].iloc[call[which]].assign(start_ns=begins[which], end_ns=until[which])
    row = tightest(*on_one_line([named, stretches]))
    of_operator = row >= len(trace.ranges)
    operator_codes = np.append(operators["name"].cat.codes.to_numpy(np.int64), NONE)
    range_codes = np.append(full_names(trace.ranges).codes.astype(np.int64), NONE)
    found.of_calls[which] = of_operator
    found.call[which] = operator_codes[np.where(of_operator, row - len(trace.ranges), NONE)]
    found.range[which] = range_codes[np.where(of_operator, NONE, row)]
