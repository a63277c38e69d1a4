"""Tables of kernels, copies and calls by name: their number, their time, and the bytes that they moved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from labkit.nsys.tables.catalogue import SPREAD
from labkit.nsys.tables.places import rank_of
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.trace import Trace
from labkit.statistics import P95_SAMPLES
from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean

CALL_NAMES = {"api": "CUDA", "op": "PyTorch", "os": "system"}
KERNEL_KEYS = ("name", "rank", "device", "stream", "grid", "block")
SIZES = {"< 4 KB": 4e3, "4-64 KB": 64e3, "64 KB-1 MB": 1e6, "1-16 MB": 16e6, "> 16 MB": np.inf}
UNKNOWN = "unknown"  # the size of copies whose bytes the file lacks


def spread(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """One row per group of `by`, the most time first, for a frame with the column `time_ns`.

    Columns: `by`, count, total_ns, share (of all groups' total), avg_ns, median_ns, p95_ns (<NA> for fewer than 59
    rows, which do not bound it), min_ns, max_ns.
    """
    groups = frame.groupby(by, observed=True, sort=False)["time_ns"]
    table = groups.agg(["count", "sum", "mean", "median", "min", "max"])
    table.columns = pd.Index(["count", "total_ns", "avg_ns", "median_ns", "min_ns", "max_ns"])
    table["p95_ns"] = groups.quantile(0.95).astype("Float64").where(table["count"] >= P95_SAMPLES, pd.NA)
    table["share"] = table["total_ns"] / max(int(table["total_ns"].sum()), 1)
    rows = table[list(SPREAD)].reset_index()
    texts = {name: "str" for name in by if isinstance(rows[name].dtype, pd.CategoricalDtype)}
    return rows.astype(texts).sort_values(["total_ns", *by], ascending=[False, *([True] * len(by))], ignore_index=True)


def kernels(trace: Trace, selection: Selection = EVERYTHING, by: Sequence[str] = ("name",)) -> pd.DataFrame:
    """The kernels by name, or by any of KERNEL_KEYS, the most time first: see `spread`.

    The times of kernels that run at the same time add up, so `share` is of all kernels' time, not of the run's. CUDA
    graphs that were traced as a whole count as kernels of the name "graph".
    """
    if unknown := [key for key in by if key not in KERNEL_KEYS]:
        raise UserError(
            f"got the key {unknown[0]!r}{did_you_mean(unknown[0], KERNEL_KEYS)}, expected some of "
            f"{', '.join(KERNEL_KEYS)}"
        )
    return spread(_timed(trace, selection.rows(trace, "operations", "kernel", "graph")), list(by))


def copies(trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    """Copies and memsets by kind, memory and size. Columns as in `spread`, and:

    - memory: such as "Pageable -> Device"; "" if the file lacks it;
    - size: a class of SIZES, or UNKNOWN;
    - bytes: their sum; gb_s: bytes / total_ns. Both are <NA> if the file lacks the bytes.
    """
    rows = _timed(trace, selection.rows(trace, "operations", "memcpy", "memset"))
    rows["bytes"] = rows["bytes"].astype("Int64").where(rows["bytes"] > 0)
    sizes = pd.cut(rows["bytes"].astype("float64"), [0.0, *SIZES.values()], right=False, labels=list(SIZES))
    rows["size"] = sizes.cat.add_categories([UNKNOWN]).fillna(UNKNOWN)
    keys = ["name", "memory", "size"]
    table = spread(rows, keys)
    moved = rows.groupby(keys, observed=True)["bytes"].sum(min_count=1).reset_index().astype(dict.fromkeys(keys, "str"))
    table = table.merge(moved, on=keys)
    table["gb_s"] = table["bytes"] / table["total_ns"].clip(lower=1)
    return table


def calls(trace: Trace, selection: Selection = EVERYTHING, kind: str | None = None) -> pd.DataFrame:
    """The calls by library and name, the most time first: see `spread`. `kind`: one of CALL_KINDS.

    A call's time includes the calls in it, and waiting. `share` is of the time of all calls of its library.
    """
    rows = selection.rows(trace, "calls", *([kind] if kind else []))
    rows = rows.assign(
        time_ns=rows["end_ns"] - rows["start_ns"],
        library=rows["kind"].cat.rename_categories(CALL_NAMES),
        rank=rank_of(trace, rows),
    )
    table = spread(rows, ["library", "name"])
    whole = table.groupby("library")["total_ns"].transform("sum").clip(lower=1)
    return table.assign(share=table["total_ns"] / whole)


def _timed(trace: Trace, rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(time_ns=(rows["end_ns"] - rows["start_ns"]).clip(lower=0), rank=rank_of(trace, rows))
