"""Ranges by name, with their time on the GPU."""

from __future__ import annotations

import numpy as np
import pandas as pd

from labkit.nsys.analysis.intervals import Union
from labkit.nsys.analysis.projection import project
from labkit.nsys.tables.bare_names import without_numbers
from labkit.nsys.tables.operations import spread
from labkit.nsys.tables.places import rank_of
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.trace import Trace


def projection(trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    """The rows of `labkit.nsys.project` for the selected ranges, with rank and busy_ns.

    busy_ns is the part of the projected time in which the range's process had work on a GPU.
    """
    selected = selection.of(trace, "ranges")
    rows = project(trace, graphs=True)
    rows = rows[selected[rows["range"].to_numpy()]].reset_index(drop=True)
    return rows.assign(rank=rank_of(trace, rows), busy_ns=_busy_ns(trace, rows))


def ranges(trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    """The ranges by name, the most time first.

    The time of a range is on the GPU, from its first operation to its last; without a GPU it is the range itself.
    Columns as in `spread`, and:

    - range_total_ns: on the CPU;
    - operations: calls that led to GPU work;
    - busy_share: the share of the GPU time in which the GPU was busy (<NA> without a GPU).

    Ranges that launched nothing have no time on a GPU and are left out. Names that differ only in a number that
    counts ("train_step 7", "ProfilerStep#7", "aten::mul, seq = 46, op_id = 9") share a row (`without_numbers`).
    """
    rows = projection(trace, selection).rename(columns={"duration_ns": "time_ns"})
    rows["name"] = without_numbers(rows["name"].array, rows["process"].to_numpy())
    table = spread(rows, ["name"])
    sums = rows.groupby("name", observed=True)[["range_duration_ns", "operations", "busy_ns", "time_ns"]].sum()
    sums = sums.reindex(table["name"])
    busy = (sums["busy_ns"] / sums["time_ns"].clip(lower=1)).to_numpy()
    return table.assign(
        range_total_ns=sums["range_duration_ns"].to_numpy(),
        operations=sums["operations"].to_numpy(),
        busy_share=pd.array(busy if trace.on_gpu else [pd.NA] * len(table), dtype="Float64"),
    )


def _busy_ns(trace: Trace, rows: pd.DataFrame) -> np.ndarray:
    """The part of each row's projected time that its process's GPU work covers."""
    busy = np.zeros(len(rows), np.int64)
    of_row, of_operation = rows["process"].to_numpy(), trace.operations["process"].to_numpy()
    start, end = (trace.operations[name].to_numpy() for name in ("start_ns", "end_ns"))
    for process in np.unique(of_row):
        own, work = of_row == process, of_operation == process
        opens = rows["start_ns"].to_numpy()[own]
        union = Union.of(start[work], end[work])
        busy[own] = union.covered_ns(opens, opens + rows["duration_ns"].to_numpy()[own])
    return busy
