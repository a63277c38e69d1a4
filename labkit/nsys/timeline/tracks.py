"""The processes and threads on which a viewer shows the events of a trace, so that events nest."""

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
    """The process and thread to show each event on."""

    pid: Ints
    tid: Ints  # differs from `own` for an event that crosses another one
    own: Ints  # the number of the event's thread or stream

    def distinct(self) -> list[tuple[int, int, int]]:
        """Every combination of pid, tid and own, once."""
        rows = np.unique(np.stack([self.pid, self.tid, self.own], axis=1), axis=0)
        return [(int(pid), int(tid), int(own)) for pid, tid, own in rows]


@dataclass(frozen=True)
class Tracks:
    """The places of all events of a trace."""

    pids: Ints  # of each process
    gpus: dict[int, tuple[int, int]]  # by pid of a further process: the process and device that it stands for
    ranges: Placed
    calls: Placed
    operations: Placed


def tracks(trace: Trace) -> Tracks:
    """Puts ranges and calls on their threads, and operations on a process for each GPU of a process, by stream."""
    pids, count = _pids(trace), len(trace.ranges)
    columns = ["process", "tid", "start_ns", "end_ns"]
    cpu = pd.concat([trace.ranges[columns], trace.calls[columns]], ignore_index=True)
    (thread,) = numbered([cpu], "tid")
    start, end = (cpu[name].to_numpy() for name in ("start_ns", "end_ns"))
    level = np.zeros(len(cpu), np.int64)
    crossed = np.unique(thread[crossing(start, end, thread)])
    level[:count] = (trace.ranges["style"] == "StartEnd") & np.isin(thread[:count], crossed)
    nested = np.flatnonzero(level == 0)
    level[nested] = crossing(start[nested], end[nested], thread[nested])
    moved = np.flatnonzero(level)
    level[moved] += levels(start[moved], end[moved], thread[moved])
    on_cpu = _placed(pids[cpu["process"].to_numpy()], cpu["tid"].to_numpy(), level)

    work = trace.operations
    process, device = work["process"].to_numpy(np.int64), work["device"].to_numpy(np.int64)
    (gpu,) = numbered([work], "device")
    gpu_pids = _free(pids, int(gpu.max(initial=-1)) + 1)
    gpus = {
        int(gpu_pids[number]): (int(process[at]), int(device[at]))
        for number, at in zip(*np.unique(gpu, return_index=True), strict=True)
    }
    stream = work["stream"].to_numpy()
    _, queue = np.unique(np.stack([gpu, stream], axis=1), axis=0, return_inverse=True)
    level = levels(work["start_ns"].to_numpy(), work["end_ns"].to_numpy(), queue.reshape(-1)).astype(np.int64)
    return Tracks(
        pids,
        gpus,
        Placed(on_cpu.pid[:count], on_cpu.tid[:count], on_cpu.own[:count]),
        Placed(on_cpu.pid[count:], on_cpu.tid[count:], on_cpu.own[count:]),
        _placed(gpu_pids[gpu], stream, level),
    )


def _placed(pid: Ints, own: Ints, level: Ints) -> Placed:
    """The places of events: level 0 stays on the own thread, each further level becomes a thread with a free number."""
    tid = own.astype(np.int64, copy=True)
    moved = np.flatnonzero(level)
    if len(moved):
        places = np.stack([pid[moved], own[moved], level[moved]], axis=1)
        _, number = np.unique(places, axis=0, return_inverse=True)
        tid[moved] = _free(own, int(number.max()) + 1)[number.reshape(-1)]
    return Placed(np.asarray(pid, np.int64), tid, own)


def _pids(trace: Trace) -> Ints:
    """The numbers of the processes. A missing or repeated number is replaced with a free one."""
    frames = (trace.ranges, trace.calls, trace.operations)
    count = max([len(trace.processes), *(int(frame["process"].max()) + 1 for frame in frames if len(frame))])
    pids = np.append(trace.processes["pid"].to_numpy(np.int64), np.zeros(count - len(trace.processes), np.int64))
    again = pd.Series(pids).duplicated().to_numpy() | (pids == 0)
    pids[again] = _free(pids, int(again.sum()))
    return pids


def _free(used: Ints, count: int) -> Ints:
    """Positive numbers that are not used: those after the largest, or the smallest ones where that is near the end of
    int64.
    """
    after = max(int(used.max(initial=0)), 0) + 1
    if after + count <= np.iinfo(np.int64).max:
        return after + np.arange(count, dtype=np.int64)
    return np.setdiff1d(np.arange(1, len(used) + count + 1, dtype=np.int64), used)[:count]
