"""Which API call led to which work on the GPU."""

from __future__ import annotations

import pandas as pd

from labkit.nsys.analysis.containment import Integers, numbered
from labkit.nsys.trace import Trace


def launches(trace: Trace, operations: pd.DataFrame) -> tuple[pd.DataFrame, Integers, Integers]:
    """The API calls that have a correlation, a number for each call, and a number for each of `operations`.

    A number stands for a process and a correlation: a call led to the operations that have its number. Operations
    without a correlation have numbers that no call has.
    """
    calls = trace.calls
    calls = calls[((calls["kind"] == "api") & (calls["correlation"] != 0)).to_numpy()]
    of_call, of_operation = numbered([calls, operations], "correlation")
    return calls, of_call, of_operation
