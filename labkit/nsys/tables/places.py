"""Places of work: the ranks of a trace's processes, the devices of each process, and the ranges around launches."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.containment import NONE, on_one_line, tightest
from labkit.nsys.analysis.launches import call_times, first_calls
from labkit.nsys.analysis.projection import full_names
from labkit.nsys.analysis.rank_numbers import ranks
from labkit.nsys.arrays import Ints
from labkit.nsys.tables.bare_names import without_numbers
from labkit.nsys.trace import Trace


def rank_of(trace: Trace, frame: pd.DataFrame) -> Ints:
    """The rank of each row of a frame with a column `process`."""
    return ranks(trace)[frame["process"].to_numpy()]


def devices(trace: Trace) -> pd.DataFrame:
    """One row per device with operations, by rank and number.

    Its columns: process, rank, device, name ("": unknown), bandwidth_gb_s (0: unknown).
    """
    used = trace.operations[["process", "device"]].drop_duplicates()
    described = trace.devices.astype({"name": "str"}).drop_duplicates(["process", "device"])
    table = used.merge(described, how="left", on=["process", "device"])
    table = table.assign(
        rank=rank_of(trace, table), name=table["name"].fillna(""), bandwidth_gb_s=table["bandwidth_gb_s"].fillna(0.0)
    )
    columns = ["process", "rank", "device", "name", "bandwidth_gb_s"]
    return table[columns].sort_values(["rank", "device"], ignore_index=True)


def on_device(operations: pd.DataFrame, process: int, device: int) -> NDArray[np.bool_]:
    """Whether each operation ran on this device of this process."""
    return ((operations["process"] == process) & (operations["device"] == device)).to_numpy()


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
