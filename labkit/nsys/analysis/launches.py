"""Which API call led to which work on the GPU."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd

from labkit.nsys.analysis.containment import NONE, numbered
from labkit.nsys.arrays import Ints
from labkit.nsys.trace import Trace

_FIRST_CALLS: WeakKeyDictionary[Trace, Ints] = WeakKeyDictionary()


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
    """For each operation the row of the API call that led to it, of several the first; NONE where there is none.

    It takes a second for millions of rows, and many tables of a trace need it, so it is kept as long as the trace is.
    """
    if trace not in _FIRST_CALLS:
        _FIRST_CALLS[trace] = _first_calls(trace)
        _FIRST_CALLS[trace].setflags(write=False)
    return _FIRST_CALLS[trace]


def _first_calls(trace: Trace) -> Ints:
    calls, of_call, of_operation = launches(trace, trace.operations)
    first = np.full(max(of_call.max(initial=NONE), of_operation.max(initial=NONE)) + 1, NONE)
    first[of_call[::-1]] = calls.index[::-1]
    return first[of_operation]
