"""Ends a run that torchrun would wait for in vain: a rank is stopped, or another machine has ended the run."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Self

from labkit.launcher.machines import Machines
from labkit.launcher.stopped import LOOK_S, StoppedRanks, left_in, stands_still


class Watch:
    """Watches this machine's ranks inside its context.

    - pids: the folder with the process ids of the ranks.
    - machines: the machines of the run; None if there is only this one.
    - cause: why a rank was killed by this watch, after which torchrun ends the others; None if none was.
    """

    def __init__(self, pids: Path, machines: Machines | None) -> None:
        self.cause: str | None = None
        self._pids, self._machines = pids, machines
        self._stopped, self._over = StoppedRanks(alone=machines is None), Event()
        self._thread = Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        if self._machines is not None:
            signal.signal(signal.SIGTSTP, self._pause)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        if self._machines is not None:
            self._machines.leave()

    def _look(self) -> None:
        while self.cause is None and not self._over.wait(LOOK_S):
            pids = left_in(self._pids)
            rank = self._stopped.look(pids)
            if rank is not None:
                where = "" if self._machines is None else f" on {self._machines.name}"
                self._end(pids[rank], f"error: rank {rank} failed{where}: {stands_still(pids[rank])}")
            elif pids and self._machines is not None and (cause := self._machines.lost(LOOK_S)):
                self._end(next(iter(pids.values())), cause)

    def _end(self, pid: int, cause: str) -> None:
        self.cause = cause
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _pause(self, *signalled: object) -> None:
        """Handles Ctrl-Z: stops this process. The ranks go on, as they have sessions of their own."""
        assert self._machines is not None
        self._machines.pause()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._machines.is_pausing = False
