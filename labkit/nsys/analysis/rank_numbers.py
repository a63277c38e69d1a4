"""The rank of each process of a trace, or a number in its place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labkit.nsys.trace import Trace

NUMBERED = "the ranks of the processes are not known; they are numbered by device, then by process id"


def ranks(trace: Trace) -> NDArray[np.int64]:
    """The rank of each process, or a number if the ranks are not known or two processes share one.

    Processes are numbered by the first device that they used, then by their process ids. Processes without a device
    come last.
    """
    rank = trace.processes["rank"].to_numpy(np.int64)
    if ranks_are_known(trace) or not len(rank):
        return rank if len(rank) else np.zeros(1, np.int64)
    device = np.full(len(rank), np.iinfo(np.int64).max)
    np.minimum.at(device, trace.operations["process"].to_numpy(), trace.operations["device"].to_numpy(np.int64))
    number = np.empty(len(rank), np.int64)
    number[np.lexsort((trace.processes["pid"].to_numpy(), device))] = np.arange(len(rank))
    return number


def ranks_are_known(trace: Trace) -> bool:
    """Whether `ranks` are the ranks of the run."""
    rank = trace.processes["rank"].to_numpy()
    return bool(len(rank) and (rank >= 0).all() and len(np.unique(rank)) == len(rank))


def rank_word(trace: Trace) -> str:
    """The word for the numbers of `ranks`: "rank", or "process" where the ranks are not known."""
    return "rank" if ranks_are_known(trace) else "process"
