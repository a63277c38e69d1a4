"""The CPU's calls: CUDA's runtime and driver, operators of PyTorch, the system's libraries."""

from __future__ import annotations

import pandas as pd

from labkit.nsys.tables.places import rank_of
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.tables.spread import spread
from labkit.nsys.trace import Trace

CALL_NAMES = {"api": "CUDA", "op": "PyTorch", "os": "system"}


def calls(trace: Trace, selection: Selection = EVERYTHING, kind: str | None = None) -> pd.DataFrame:
    """The calls by library and name, the most time first: see `spread`. `kind`: one of CALL_KINDS.

    A call's time includes the calls in it, and waiting. `share` is of the time of all calls of its library.
    """
    among = (trace.calls["kind"] == kind).to_numpy() if kind else None
    rows = trace.calls[selection.of(trace, "calls", among=among)]
    rows = rows.assign(
        time_ns=rows["end_ns"] - rows["start_ns"],
        library=rows["kind"].cat.rename_categories(CALL_NAMES),
        rank=rank_of(trace, rows),
    )
    table = spread(rows, ["library", "name"])
    whole = table.groupby("library")["total_ns"].transform("sum").clip(lower=1)
    return table.assign(share=table["total_ns"] / whole)
