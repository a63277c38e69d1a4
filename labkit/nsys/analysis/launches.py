"""The API calls that launched the GPU's work."""

from __future__ import annotations

import re
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.containment import NONE, numbered
from labkit.nsys.arrays import Ints
from labkit.nsys.trace import Trace

_FIRST_CALLS: WeakKeyDictionary[Trace, Ints] = WeakKeyDictionary()
ONE_KERNEL = re.compile(r"Launch\w*Kernel(?!\w*MultiDevice)")  # calls of CUDA and HIP that launch one kernel
FEWEST_SHARED = 3  # kernels of one correlation; two may be a collision of reused numbers
TIMES = ["start_ns", "end_ns", "process", "tid"]


def launches(trace: Trace, operations: pd.DataFrame) -> tuple[pd.DataFrame, Ints, Ints]:
    """The API calls that have a correlation, a number for each call, and a number for each of `operations`.

    A number stands for a process and a correlation: a call led to the operations that have its number. Operations
    without a correlation have numbers that no call has.
    """
    calls = trace.calls
    calls = calls[((calls["kind"] == "api") & (calls["correlation"] != 0)).to_numpy()]
    of_call, of_operation = numbered([calls, operations], "correlation")
    return calls, of_call, of_operation


def first_calls(trace: Trace) -> Ints:
    """For each operation the row of the first API call that led to it; NONE without a call, and for `shared_launches`.

    This takes a second for millions of rows and many tables of a trace need it, so it is kept as long as the trace.
    """
    if trace not in _FIRST_CALLS:
        call, shared = _called(trace)
        _FIRST_CALLS[trace] = np.where(shared, NONE, call)
        _FIRST_CALLS[trace].setflags(write=False)
    return _FIRST_CALLS[trace]


def shared_launches(trace: Trace) -> NDArray[np.bool_]:
    """Whether each operation names a call that launches one kernel, but that most kernels of the process name."""
    return _called(trace)[1]


def _called(trace: Trace) -> tuple[Ints, NDArray[np.bool_]]:
    """The first call that each operation names, and whether that call cannot have led to all kernels that name it."""
    calls, of_call, of_operation = launches(trace, trace.operations)
    first = np.full(max(of_call.max(initial=NONE), of_operation.max(initial=NONE)) + 1, NONE)
    first[of_call[::-1]] = calls.index[::-1]
    call = first[of_operation]
    names = trace.calls["name"].cat
    of_one = np.array([*(bool(ONE_KERNEL.search(str(name))) for name in names.categories), False], bool)
    launches_one = of_one[np.append(names.codes, NONE)[call]] & (call != NONE)
    alone = (trace.operations["kind"] == "kernel").to_numpy() & (trace.operations["graph_node"] == 0).to_numpy()
    kernels = np.bincount(of_operation[alone & launches_one], minlength=len(first))[of_operation]
    process = trace.operations["process"].to_numpy()
    of_process = np.bincount(process[alone], minlength=process.max(initial=0) + 1)[process]
    return call, launches_one & (kernels >= FEWEST_SHARED) & (kernels > of_process / 2)


def beginnings(calls: pd.DataFrame) -> pd.DataFrame:
    """The first nanosecond of each call, as an interval of its thread. A range that is open then encloses the call.

    Profilers round times, so that a call may seem to end after the operator or range in which it was made.
    """
    start, end = calls["start_ns"], calls["end_ns"]
    return calls[TIMES].assign(end_ns=np.minimum(end, start + 1))


def call_times(trace: Trace, calls: Ints) -> pd.DataFrame:
    """The intervals by which the range around each call is found. `calls`: rows of `trace.calls`.

    In exports of nsys a call counts from start to end: their times are exact, and nsys's own reports do this. In other
    traces its beginning counts (`beginnings`).
    """
    rows = trace.calls.iloc[calls]
    return rows[TIMES] if trace.source.profiler == "nsys" else beginnings(rows)
