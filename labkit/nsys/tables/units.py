"""Units of work that two traces repeat, steps or instances of a range, by which their times can be compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from labkit.nsys.analysis.projection import project
from labkit.nsys.tables.bare_names import without_numbers
from labkit.nsys.tables.selection import Selection
from labkit.nsys.trace import Trace
from labkit.stages import DOMAIN, Phase, step_message

STEPS = (f"{DOMAIN}:{step_message(Phase.DECODE)}", "ProfilerStep")  # preferred to any other range


@dataclass(frozen=True)
class Units:
    """The unit of a comparison. A unit that a window cuts counts by the part of its GPU time in the window."""

    name: str  # of the range
    a: float  # number of units of side A, mean of its processes
    b: float

    @property
    def differ(self) -> bool:
        return abs(self.a - self.b) > 1e-3 * max(self.a, self.b)


def units_of(a: Trace, b: Trace, selection: Selection) -> Units | None:
    """The unit of both sides; None without one.

    It is the longest of the ranges that `selection.range` names, if given; else the steps of labkit or of PyTorch's
    profiler; else the ranges that fill most of both sides' time, with at least two on each side.
    """
    sides = [_instances(side, selection) for side in (a, b)]
    shared = sides[0].index.intersection(sides[1].index)
    counts = pd.DataFrame({letter: side["count"].reindex(shared) for letter, side in zip("ab", sides, strict=True)})
    time = sides[0]["time_ns"].reindex(shared) + sides[1]["time_ns"].reindex(shared)
    steps = [name for name in STEPS if name in shared]
    if selection.range is None and not steps:
        time = time[(counts > 1).all(axis=1)]
    name = steps[0] if steps and selection.range is None else time.idxmax() if len(time) else None
    return None if name is None else Units(str(name), float(counts.loc[name, "a"]), float(counts.loc[name, "b"]))


def _instances(trace: Trace, selection: Selection) -> pd.DataFrame:
    """The ranges that launched work, by name: count (mean of the processes that have them) and time_ns."""
    rows = project(trace, graphs=True)
    among = Selection(ranks=selection.ranks, range=selection.range)
    rows = rows[among.of(trace, "ranges")[rows["range"].to_numpy()]] if len(rows) else rows
    start, process = rows["start_ns"].to_numpy(), rows["process"].to_numpy()
    length = np.maximum(rows["duration_ns"].to_numpy(), 1)
    opens, closes = selection.window_ns or (int(start.min(initial=0)), int((start + length).max(initial=0)))
    within = np.clip(np.minimum(start + length, closes) - np.maximum(start, opens), 0, None)
    parts = pd.DataFrame(
        {
            "name": np.asarray(without_numbers(rows["name"].array, process).astype(str), object),
            "count": within / length,
            "time_ns": within,
            "process": process,
        }
    )
    parts = parts[(parts["time_ns"] > 0).to_numpy() & (parts["name"] != "").to_numpy()]
    table = parts.groupby("name").agg(
        count=("count", "sum"), time_ns=("time_ns", "sum"), processes=("process", "nunique")
    )
    return table.assign(count=table["count"] / table["processes"].clip(lower=1))
