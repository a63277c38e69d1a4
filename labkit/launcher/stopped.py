"""Finds stopped ranks, for which all others would wait."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from labkit.system.process_state import ENDED, STOPPED, process_state

LOOK_S = 0.25
LOOKS = 8  # in a row: somebody may stop a rank for a moment
PIDS = "LABKIT_PIDS"  # the folder in which each rank of this machine leaves its process id


class StoppedRanks:
    """Finds a rank of this machine that has been stopped for `LOOKS` looks while other ranks ran.

    If all ranks of the run are stopped, for instance because somebody pauses the whole run, no rank waits for another
    and none is reported. A rank that a debugger holds does not count as stopped.

    alone: this machine has all ranks of the run. If not, ranks of other machines wait even when all ranks of this
    machine are stopped.
    """

    def __init__(self, *, alone: bool = True) -> None:
        self._alone, self._stopped_for = alone, 0

    def look(self, pids: Mapping[int, int]) -> int | None:
        """The first stopped rank, once it is certain; None: no rank is stopped, or not for long enough.

        pids: process ids by rank.
        """
        states = {rank: process_state(pid) for rank, pid in pids.items()}
        stopped = [rank for rank, state in sorted(states.items()) if state == STOPPED]
        waiting = [rank for rank, state in states.items() if state not in STOPPED + ENDED]
        blocks = bool(stopped) and (bool(waiting) or not self._alone)
        self._stopped_for = self._stopped_for + 1 if blocks else 0
        return stopped[0] if self._stopped_for >= LOOKS else None


def stands_still(pid: int) -> str:
    """The message about a stopped rank with this process id."""
    return f"its process, {pid}, is stopped, and the other ranks wait for it"


def left_in(folder: Path) -> dict[int, int]:
    """The process ids of this machine's ranks, by rank: each rank has left a file RANK.PID in the folder."""
    return {int(file.stem): int(file.suffix[1:]) for file in folder.iterdir()}
