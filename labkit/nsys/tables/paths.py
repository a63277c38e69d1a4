"""Nested ranges as paths, from the outermost to the innermost: "generate/forward/layer"."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labkit.nsys.analysis.containment import NONE, on_one_line, parents, tightest
from labkit.nsys.analysis.launches import call_times, first_calls
from labkit.nsys.analysis.projection import full_names
from labkit.nsys.tables.bare_names import without_numbers
from labkit.nsys.trace import Trace


def range_paths(trace: Trace) -> NDArray[np.object_]:
    """The path of each range."""
    bare = without_numbers(full_names(trace.ranges), trace.ranges["process"].to_numpy())
    names = np.asarray(bare.astype(str), object)
    (line,) = on_one_line([trace.ranges])
    parent, level = parents(line)
    paths = np.append(names, "")
    for row in np.argsort(level, kind="stable").tolist():
        if parent[row] != NONE:
            paths[row] = f"{paths[parent[row]]}/{names[row]}"
    return paths[:-1]


def operation_paths(trace: Trace) -> NDArray[np.object_]:
    """The path of the ranges around the launch of each GPU operation; "" without ranges."""
    call = first_calls(trace)
    launched = call != NONE
    range_rows = np.full(len(call), NONE)
    range_rows[launched] = tightest(*on_one_line([trace.ranges, call_times(trace, call[launched])]))
    return np.append(range_paths(trace), "")[range_rows]
