"""Where a viewer shows the events of a trace: numbers of processes and threads on which everything nests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from labkit.nsys.analysis.containment import numbered
from labkit.nsys.analysis.nesting import crossing, levels
from labkit.nsys.arrays import Ints
from labkit.nsys.trace import Trace


@dataclass(frozen=True)
class Placed:
    """Of each event the process and thread to show it on; `own` is the number of its thread or stream.

    The two differ for what overlaps something else there without being held by it.
    """

    pid: Ints
    tid: Ints
    own: Ints

    def distinct(self) -> list[tuple[int, int, int]]:
        """Every combination of pid, tid and own, once."""
        rows = np.unique(np.stack([self.pid, self.tid, self.own], axis=1), axis=0)
        return [(int(pid), int(tid), int(own)) for pid, tid, own in rows]


@dataclass(frozen=True)
class Tracks:
    """`pids`: of each process. `gpus`: the (process, device) that each further process stands for."""

    pids: Ints
    gpus: dict[int, tuple[int, int]]
    ranges: Placed
    calls: Placed
    operations: Placed


def tracks(trace: Trace) -> Tracks:
    """Ranges and calls are on their threads, operations in a process for each GPU of a process, by stream."""
    pids = _pids(trace)
    columns = ["process", "tid", "start_ns", "end_ns"]
    cpu = pd.concat([trace.ranges[columns], trace.calls[columns]], ignore_index=True)
    (thread,) = numbered([cpu], "tid")
    start, end = (cpu[name].to_numpy() for name in ("start_ns", "end_ns"))
    level = np.zeros(len(cpu), np.int64)
    level[: len(trace.ranges)] = (trace.ranges["style"] == "StartEnd") & np.isin(
        thread[: len(trace.ranges)], np.unique(thread[crossing(start, end, thread)])
    )
    nested = np.flatnonzero(level == 0)
    level[nested] = crossing(start[nested], end[nested], thread[nested])
    beside = np.flatnonzero(level)
    level[beside] += levels(start[beside], end[beside], thread[beside])
    on_cpu = _placed(pids[cpu["process"].to_numpy()], cpu["tid"].to_numpy(), level)

    work = trace.operations
    process, device = work["process"].to_numpy(np.int64), work["device"].to_numpy(np.int64)
    (gpu,) = numbered([work], "device")
    gpus = {
        int(pids.max(initial=0)) + 1 + int(number): (int(process[at]), int(device[at]))
        for number, at in zip(*np.unique(gpu, return_index=True), strict=True)
    }
    gpu_pid = gpu + int(pids.max(initial=0)) + 1
    stream = work["stream"].to_numpy()
    _, queue = np.unique(np.stack([gpu, stream], axis=1), axis=0, return_inverse=True)
    level = levels(work["start_ns"].to_numpy(), work["end_ns"].to_numpy(), queue.reshape(-1)).astype(np.int64)
    count = len(trace.ranges)
    return Tracks(
        pids,
        gpus,
        Placed(on_cpu.pid[:count], on_cpu.tid[:count], on_cpu.own[:count]),
        Placed(on_cpu.pid[count:], on_cpu.tid[count:], on_cpu.own[count:]),
        _placed(gpu_pid, stream, level),
    )


def _placed(pid: Ints, own: Ints, level: Ints) -> Placed:
    """Events of level 0 stay on their own thread; each further level becomes a thread with a number that is free."""
    tid = own.astype(np.int64, copy=True)
    moved = np.flatnonzero(level)
    if len(moved):
        places = np.stack([pid[moved], own[moved], level[moved]], axis=1)
        _, number = np.unique(places, axis=0, return_inverse=True)
        tid[moved] = max(int(own.max()), 0) + 1 + number.reshape(-1)
    return Placed(np.asarray(pid, np.int64), tid, own)


def _pids(trace: Trace) -> Ints:
    """The numbers of the processes. Where two have the same, another one is made up."""
    frames = (trace.ranges, trace.calls, trace.operations)
    count = max([len(trace.processes), *(int(frame["process"].max()) + 1 for frame in frames if len(frame))])
    pids = np.append(trace.processes["pid"].to_numpy(np.int64), np.zeros(count - len(trace.processes), np.int64))
    free = int(pids.max(initial=0)) + 1
    again = pd.Series(pids).duplicated().to_numpy() | (pids == 0)
    pids[again] = free + np.arange(int(again.sum()))
    return pids
