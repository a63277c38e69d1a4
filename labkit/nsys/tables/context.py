"""The ranges on the CPU in which a GPU's work was launched."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.containment import NONE, on_one_line, tightest
from labkit.nsys.analysis.launches import call_times, first_calls
from labkit.nsys.analysis.projection import full_names
from labkit.nsys.arrays import Ints
from labkit.nsys.tables.bare_names import without_numbers
from labkit.nsys.trace import Trace


def ranges_around(trace: Trace, operations: Ints, among: NDArray[np.bool_] | None = None) -> NDArray[np.object_]:
    """For rows of `trace.operations`, the name of the innermost range around their launch; "" without one.

    Numbers that only count are left out of names (`without_numbers`). `among`: whether each row of `trace.ranges`
    counts.
    """
    ranges = trace.ranges if among is None else trace.ranges[among]
    names = without_numbers(full_names(ranges), ranges["process"].to_numpy())
    if not len(operations):
        return np.zeros(0, object)
    row = range_rows(trace, ranges, first_calls(trace)[operations])
    texts = np.array([*map(str, names.categories), ""], object)
    return texts[np.append(names.codes, NONE)[row]]


def range_rows(trace: Trace, ranges: pd.DataFrame, call: Ints) -> Ints:
    """The position in `ranges` of the innermost range around each call; NONE without one. `call`: its row, or NONE."""
    rows = np.full(len(call), NONE)
    launched = call != NONE
    rows[launched] = tightest(*on_one_line([ranges, call_times(trace, call[launched])]))
    return rows
