"""Ranks that stand still, for which all others would wait."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from labkit.system.process_state import ENDED, STOPPED, process_state

LOOK_S = 0.25
LOOKS = 8  # in a row: somebody may stop a rank for a moment
PIDS = "LABKIT_PIDS"  # the folder in which each rank of this machine leaves its process's number


class StoppedRanks:
    """Finds a rank of this machine that has been stopped for `LOOKS` looks while others ran.

    Where all ranks of the run are stopped, as when somebody stops the whole of it for a while, none waits for another,
    and none is found. A rank that a debugger holds is not stopped. alone: these are all ranks of the run; ranks of
    other machines wait for one of this machine also if it has no others here.
    """

    def __init__(self, *, alone: bool = True) -> None:
        self._alone, self._stopped_for = alone, 0

    def look(self, pids: Mapping[int, int]) -> int | None:
        """The first of the stopped ranks, once it is certain. pids: of the processes, by rank."""
        states = {rank: process_state(pid) for rank, pid in pids.items()}
        stopped = [rank for rank, state in sorted(states.items()) if state == STOPPED]
        waiting = [rank for rank, state in states.items() if state not in STOPPED + ENDED]
        found = bool(stopped) and not (self._alone and not waiting)
        self._stopped_for = self._stopped_for + 1 if found else 0
        return stopped[0] if self._stopped_for >= LOOKS else None


def stands_still(pid: int) -> str:
    """What to say of the rank whose process this is."""
    return f"its process, {pid}, is stopped, and the other ranks wait for it"


def left_in(folder: Path) -> dict[int, int]:
    """The processes of this machine's ranks, by rank: each has left a file RANK.PID in the folder."""
    return {int(file.stem): int(file.suffix[1:]) for file in folder.iterdir()}
