"""Where things ran: the ranks of a trace's processes, and the devices of each."""

from __future__ import annotations

import pandas as pd

from labkit.nsys.analysis.rank_numbers import ranks
from labkit.nsys.arrays import Ints
from labkit.nsys.trace import Trace


def rank_of(trace: Trace, frame: pd.DataFrame) -> Ints:
    """The rank of each row of a frame with a column `process`."""
    return ranks(trace)[frame["process"].to_numpy()]


def devices(trace: Trace) -> pd.DataFrame:
    """One row per device that operations ran on, by rank and number: process, rank, device, name ("": not told),
    bandwidth_gb_s (0: not told).
    """
    used = trace.operations[["process", "device"]].drop_duplicates()
    told = trace.devices.astype({"name": "str"}).drop_duplicates(["process", "device"])
    found = used.merge(told, how="left", on=["process", "device"])
    found = found.assign(
        rank=rank_of(trace, found), name=found["name"].fillna(""), bandwidth_gb_s=found["bandwidth_gb_s"].fillna(0.0)
    )
    columns = ["process", "rank", "device", "name", "bandwidth_gb_s"]
    return found[columns].sort_values(["rank", "device"], ignore_index=True)
