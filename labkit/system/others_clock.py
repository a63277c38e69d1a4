"""What other programs take of the processors.

The system counts the time that its processors were busy, or taken away by a host of virtual machines, and the time that
each process ran. The first without the time of the processes that measure is what others took.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from time import monotonic
from typing import NamedTuple

import psutil

IDLE = ("idle", "iowait")
CONTAINED = ("guest", "guest_nice")  # Linux counts them in user and nice too
SPENT = ("user", "system", "children_user", "children_system")  # of a process, and of children that it has waited for
SHORTEST_S = 1.0  # the system counts in hundredths of a second, so a shorter time says little


class LoadLap(NamedTuple):
    """Processors that others kept busy, and processors that nobody did."""

    others: float
    idle: float

    @property
    def taken(self) -> float:
        """Processors of others that the measurement could have had: those for which no idle one stood in."""
        return max(0.0, self.others - self.idle)


class OthersClock:
    """Tells how many processors other processes kept busy, from one call to the next.

    `ours` are the ids of the processes that measure. This process counts as ours too, whether or not it is among them.
    """

    def __init__(self, ours: Iterable[int] = ()) -> None:
        self._ours = {pid: psutil.Process(pid) for pid in {os.getpid(), *ours}}
        self._last = self._read()

    def add(self, process: psutil.Process) -> None:
        """Counts a process that has begun since the last lap as ours, too."""
        self._ours[process.pid] = process

    def lap(self, shortest_s: float = SHORTEST_S) -> float | None:
        """Processors since the last lap; None, and the lap goes on, where it has been shorter than `shortest_s`."""
        found = self.whole_lap(shortest_s)
        return None if found is None else found.others

    def whole_lap(self, shortest_s: float = SHORTEST_S) -> LoadLap | None:
        """As `lap`, with the idle processors."""
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
    """The clock, and seconds of processors: busy, idle, and busy with our processes."""

    at: float
    busy: float
    idle: float
    own: float


def _seconds(process: psutil.Process) -> float:
    """Processor time of a process and of the children that it has waited for; what has ended spends no more."""
    try:
        return float(sum(getattr(process.cpu_times(), name, 0.0) for name in SPENT))
    except psutil.Error:
        return 0.0
