"""What ranks that share memory know of each other: whether one has ended or stands still, and whether one has left the
call that all of them are making.

A rank that leaves a call by an error counts it on its line and says why. The others see that where they wait for it,
and leave the call too. No rank begins the next call before all have left the one that failed, so that none is ever more
than one failure ahead of another.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from labkit.system.errors import RunError
from labkit.system.process_state import ENDED, STOPPED, process_state

from .shared_memory import SharedMemory

LINE = 64  # struct Arrival of exchange.h, and so the places in it
PID, FAILED, READY = 2, 3, 4  # int32: the process; calls that failed; of those, after how many the next may begin
SAID = 1024  # bytes for why a call failed
PAUSE_S = 0.001
LOOK_S = 0.2  # between two looks at whether the processes of the other ranks still run
LOOKS_STOPPED = 15  # in a row, before a stopped rank is given up: all are stopped for a moment by Ctrl-Z and fg
TOGETHER = "all ranks of a model make the same calls, or none goes on"


class LostRankError(RunError):
    """Another rank has ended, stands still or cannot be reached: nothing comes of what is under way."""


class RankFailedError(RunError):
    """Another rank failed in a call that all of them make; the message says which, and why. All can make the next."""


def lines_bytes(ranks: int) -> int:
    """Of the memory in which `SharedRanks` of so many ranks begin."""
    return -(-ranks * (LINE + SAID) // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedRanks:
    """This rank's view of those that it shares memory with, which begins with a line for each of them.

    names: of the ranks in errors. A rank that is waited for longer than `timeout_s` is given up.
    """

    def __init__(self, shared: SharedMemory, rank: int, names: Sequence[int], timeout_s: float) -> None:
        self._memory, self._pids, self._rank, self._names = shared.memory, shared.pids, rank, names
        self._timeout_s, self._looks_stopped = timeout_s, 0
        line = ctypes.c_int32 * (LINE // 4)
        self._lines = (line * len(names)).from_buffer(shared.memory)
        self._lost: str | None = None
        self.failed_calls = 0
        for each, pid in zip(self._lines, shared.pids, strict=True):
            each[PID] = pid

    def look(self, waited_s: float) -> None:
        """Called by a rank that has waited for so long. Raises RankFailedError where another rank has left the call by
        an error, LostRankError where one has ended or stands still, and where this one has waited for too long.
        """
        self.raise_failure()
        states = [process_state(pid) for pid in self._pids]
        self._looks_stopped = self._looks_stopped + 1 if STOPPED in states else 0
        for rank, state in enumerate(states):
            if state in ENDED:
                self._give_up(f"rank {self._names[rank]} has ended")
            if state == STOPPED and self._looks_stopped >= LOOKS_STOPPED:
                self._give_up(f"rank {self._names[rank]} is stopped (its process is {self._pids[rank]})")
        if waited_s > self._timeout_s:
            self._give_up(f"no message came, or went, within {self._timeout_s:.0f} s")

    def raise_failure(self) -> None:
        """Raises RankFailedError where another rank has left the call by an error."""
        for rank, line in enumerate(self._lines):
            if line[FAILED] > self.failed_calls:
                begin = self._said_at(rank)
                said = self._memory[begin : begin + SAID].partition(b"\0")[0]
                raise RankFailedError(said.decode(errors="replace"))

    def came(self) -> None:
        """What was waited for is there."""
        self._looks_stopped = 0

    def fail_call(self, reason: str) -> None:
        """This rank leaves the call by an error. It waits for nobody."""
        begin = self._said_at(self._rank)
        self._memory[begin : begin + SAID] = reason.encode()[: SAID - 1].ljust(SAID, b"\0")
        self.failed_calls += 1
        self._lines[self._rank][FAILED] = self.failed_calls

    def begin_call(self, clear: Callable[[], None]) -> None:
        """After a call that failed: returns when all have left it, and have cleared what it has left behind."""
        if self._lost is not None:
            raise LostRankError(self._lost)
        if self._lines[self._rank][READY] == self.failed_calls:
            return
        self._wait_until_all(FAILED)
        clear()
        self._lines[self._rank][READY] = self.failed_calls
        self._wait_until_all(READY)

    def _wait_until_all(self, count: int) -> None:
        begun = looked = time.monotonic()
        while any(line[count] < self.failed_calls for line in self._lines):
            time.sleep(PAUSE_S)
            if (now := time.monotonic()) - looked > LOOK_S:
                looked = now
                self.look(now - begun)
        self.came()

    def _give_up(self, why: str) -> NoReturn:
        self._lost = f"rank {self._names[self._rank]}: {why}; {TOGETHER}"
        raise LostRankError(self._lost)

    def _said_at(self, rank: int) -> int:
        return len(self._lines) * LINE + rank * SAID
