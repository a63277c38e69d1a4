"""Nested ranges as paths, from the outermost to the innermost: "generate/forward/layer"."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.containment import NONE, on_one_line, parents, tightest
from labkit.nsys.analysis.launches import call_times, first_calls
from labkit.nsys.analysis.projection import full_names
from labkit.nsys.trace import Trace

NUMBERED = re.compile(r", (?:seq|op_id) = .*$", re.DOTALL)  # added to names by torch.autograd.profiler.emit_nvtx
STEP = re.compile(r"(?<=ProfilerStep)#\d+$")


def bare_name(name: str) -> str:
    """The name of a range without the numbers that differ between runs of the same code."""
    return STEP.sub("", NUMBERED.sub("", name))


def without_numbers(names: pd.Categorical) -> pd.Categorical:
    """The `bare_name` of each range."""
    texts = [bare_name(str(name)) for name in names.categories]
    codes, categories = pd.factorize(np.array(texts, object))
    return pd.Categorical.from_codes(np.append(codes, -1)[names.codes], pd.Index(categories, dtype="str"))


def range_paths(trace: Trace) -> NDArray[np.object_]:
    """The path of each range."""
    names = np.asarray(without_numbers(full_names(trace.ranges)).astype(str), object)
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
