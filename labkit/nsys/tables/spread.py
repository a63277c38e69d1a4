"""Counts and times of groups of rows."""

from __future__ import annotations

import pandas as pd

from labkit.statistics import P95_SAMPLES


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
    order = ["count", "total_ns", "share", "avg_ns", "median_ns", "p95_ns", "min_ns", "max_ns"]
    rows = table[order].reset_index()
    texts = {name: "str" for name in by if isinstance(rows[name].dtype, pd.CategoricalDtype)}
    return rows.astype(texts).sort_values(["total_ns", *by], ascending=[False, *([True] * len(by))], ignore_index=True)
