"""The ranks of a trace's processes, and the devices of each process."""

from __future__ import annotations

import pandas as pd

from labkit.nsys.analysis.rank_numbers import ranks
from labkit.nsys.arrays import Ints
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
