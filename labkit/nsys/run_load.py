"""The processor time that other programs take while a command is captured."""

from __future__ import annotations

from contextlib import suppress
from statistics import median
from time import monotonic

import psutil

from labkit.system.marked_run import MARK
from labkit.system.others_clock import OthersClock

LOOK_S = 0.2  # between two lists of all processes, which take a millisecond or two


class RunLoad:
    """The load on a run whose processes carry `mark`. Created before the run begins."""

    def __init__(self, mark: str) -> None:
        self._mark, self._seen = mark, set(psutil.pids())
        self._clock, self._taken, self._looked = OthersClock(), list[float](), monotonic()

    @property
    def taken_cores(self) -> float | None:
        """Processors that others took from the run, in the median second. None: the run was too short to tell."""
        return round(median(self._taken), 2) if self._taken else None

    def look(self) -> None:
        """Notes the load once a second. To be called often."""
        if (now := monotonic()) - self._looked < LOOK_S:
            return
        self._looked = now
        pids = set(psutil.pids())
        for pid in pids - self._seen:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.environ().get(MARK) == self._mark:
                    self._clock.add(process)
        self._seen = pids
        if (lap := self._clock.whole_lap()) is not None:
            self._taken.append(lap.taken)
