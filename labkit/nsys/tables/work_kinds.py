"""What a GPU operation does with its time: it computes, communicates with other devices, or copies."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.containment import numbered
from labkit.nsys.trace import Trace

COMPUTE, COMMUNICATION, COPY = "compute", "communication", "copy"
KINDS_OF_WORK = (COMPUTE, COMMUNICATION, COPY)
# Libraries of collectives, and the kernels with which vLLM, TensorRT-LLM, FlashInfer and PyTorch do without them.
COMMUNICATES = re.compile(
    r"nccl|rccl|nvshmem|cross_device_reduce|multimem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all",
    re.IGNORECASE,
)
GRAPH_LAUNCH = re.compile(r"(cuda|cu|hip)GraphLaunch")


def communicates(operations: pd.DataFrame) -> NDArray[np.bool_]:
    """Which operations are kernels that exchange data between devices, by their names."""
    names = operations["name"].cat
    told = np.array([bool(COMMUNICATES.search(str(name))) for name in names.categories], bool)
    return told[names.codes] & (operations["kind"] == "kernel").to_numpy()


def work_kinds(operations: pd.DataFrame) -> NDArray[np.int8]:
    """For each operation its row of KINDS_OF_WORK. Copies and memsets copy; graphs that were traced whole compute."""
    moves = operations["kind"].isin(["memcpy", "memset"]).to_numpy()
    kinds = np.where(moves, KINDS_OF_WORK.index(COPY), KINDS_OF_WORK.index(COMPUTE))
    return np.where(communicates(operations), KINDS_OF_WORK.index(COMMUNICATION), kinds).astype(np.int8)


def graph_launches(trace: Trace) -> pd.DataFrame:
    """The calls that launched CUDA graphs, and in the column `seen` whether any of their work is in the trace.

    Some profilers show no work for some of them. Then nobody can tell when the device was idle.
    """
    names = trace.calls["name"].cat
    told = np.array([bool(GRAPH_LAUNCH.match(str(name))) for name in names.categories], bool)
    launches = trace.calls[told[names.codes]]
    if launches.empty:
        return launches.assign(seen=False)
    of_launch, of_operation = numbered([launches, trace.operations], "correlation")
    return launches.assign(seen=np.isin(of_launch, of_operation) & (launches["correlation"] != 0).to_numpy())
