"""Which rank each process of a trace is, or what number stands for it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labkit.nsys.trace import Trace

NUMBERED = "the ranks of the processes are not known; they are numbered by device, then by process id"


def ranks(trace: Trace) -> NDArray[np.int64]:
    """The rank of each process. Where the ranks are not known, or two processes share one, they are numbered by the
    first device that they used, then by their process ids; those without a device come last.
    """
    known = trace.processes["rank"].to_numpy(np.int64)
    if ranks_are_known(trace) or not len(known):
        return known if len(known) else np.zeros(1, np.int64)
    device = np.full(len(known), np.iinfo(np.int64).max)
    np.minimum.at(device, trace.operations["process"].to_numpy(), trace.operations["device"].to_numpy(np.int64))
    number = np.empty(len(known), np.int64)
    number[np.lexsort((trace.processes["pid"].to_numpy(), device))] = np.arange(len(known))
    return number


def ranks_are_known(trace: Trace) -> bool:
    """Whether `ranks` are the ranks of the run."""
    known = trace.processes["rank"].to_numpy()
    return bool(len(known) and (known >= 0).all() and len(np.unique(known)) == len(known))


def rank_word(trace: Trace) -> str:
    """What the numbers of `ranks` are called: nothing says that a process is a rank where they are not known."""
    return "rank" if ranks_are_known(trace) else "process"
