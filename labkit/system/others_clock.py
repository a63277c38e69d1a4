"""Processors that other programs kept busy.

The system counts the time that its processors were busy, or taken away by a host of virtual machines, and the time that
each process ran. The busy time minus the time of the measuring processes is the time of the other programs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from time import monotonic
from typing import NamedTuple

import psutil

IDLE = ("idle", "iowait")
CONTAINED = ("guest", "guest_nice")  # Linux counts them in user and nice too
# Times of a process, and of the children that it has waited for.
SPENT = ("user", "system", "children_user", "children_system")
SHORTEST_S = 1.0  # the system counts in hundredths of a second, so a shorter lap is imprecise


class LoadLap(NamedTuple):
    """Average use of the processors over a lap."""

    others: float  # processors that other programs kept busy
    idle: float  # processors that no program used

    @property
    def taken(self) -> float:
        """Processors that others took from the measurement: busy with others, and not made up for by idle ones."""
        return max(0.0, self.others - self.idle)


class OthersClock:
    """Measures how many processors other programs kept busy between two calls.

    `ours`: the ids of the measuring processes. This process always counts as one of them.
    """

    def __init__(self, ours: Iterable[int] = ()) -> None:
        self._ours = {pid: psutil.Process(pid) for pid in {os.getpid(), *ours}}
        self._last = self._read()

    def add(self, process: psutil.Process) -> None:
        """Adds a process that has started since the last lap to ours."""
        self._ours[process.pid] = process

    def lap(self, shortest_s: float = SHORTEST_S) -> float | None:
        """Processors of others since the last lap. None, and the lap goes on, if it is shorter than `shortest_s`."""
        lap = self.whole_lap(shortest_s)
        return None if lap is None else lap.others

    def whole_lap(self, shortest_s: float = SHORTEST_S) -> LoadLap | None:
        """Like `lap`, with the idle processors."""
        now, last = self._read(), self._last
        seconds = now.at - last.at
        if seconds < shortest_s:
            return None
        self._last = now
        others = (now.busy - last.busy) - (now.own - last.own)
        return LoadLap(max(0.0, others / seconds), (now.idle - last.idle) / seconds)

    def _read(self) -> _Counted:
        times = psutil.cpu_times()._asdict()
        busy = sum(spent for name, spent in times.items() if name not in (*IDLE, *CONTAINED))
        idle = sum(spent for name, spent in times.items() if name in IDLE)
        return _Counted(monotonic(), busy, idle, sum(map(_seconds, self._ours.values())))


class _Counted(NamedTuple):
    """Counters of the system, in seconds."""

    at: float  # of the clock
    busy: float  # of all processors
    idle: float  # of all processors
    own: float  # of processors, for our processes


def _seconds(process: psutil.Process) -> float:
    """Processor time of a process and of the children that it has waited for; 0 once it has ended."""
    try:
        return float(sum(getattr(process.cpu_times(), name, 0.0) for name in SPENT))
    except psutil.Error:
        return 0.0
