"""The kind of work of a GPU operation: computing, communicating with other devices, or copying."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.communication import communicates
from labkit.nsys.analysis.containment import numbered
from labkit.nsys.arrays import matching
from labkit.nsys.trace import Trace

COMPUTE, COMMUNICATION, COPY = "compute", "communication", "copy"
KINDS_OF_WORK = (COMPUTE, COMMUNICATION, COPY)
GRAPH_LAUNCH = re.compile(r"^(cuda|cu|hip)GraphLaunch")


def work_kinds(operations: pd.DataFrame) -> NDArray[np.int8]:
    """For each operation its position in KINDS_OF_WORK. Memsets count as copies, graphs traced whole as computing."""
    moves = operations["kind"].isin(["memcpy", "memset"]).to_numpy()
    kinds = np.where(moves, KINDS_OF_WORK.index(COPY), KINDS_OF_WORK.index(COMPUTE))
    return np.where(communicates(operations), KINDS_OF_WORK.index(COMMUNICATION), kinds).astype(np.int8)


def graph_launches(trace: Trace) -> pd.DataFrame:
    """The calls that launched CUDA graphs. The column `seen` says whether any of their work is in the trace.

    Some profilers lack the work of some graphs. Then the idle time of the device is not known.
    """
    launches = trace.calls[matching(trace.calls["name"], GRAPH_LAUNCH)]
    if launches.empty:
        return launches.assign(seen=False)
    of_launch, of_operation = numbered([launches, trace.operations], "correlation")
    return launches.assign(seen=np.isin(of_launch, of_operation) & (launches["correlation"] != 0).to_numpy())
