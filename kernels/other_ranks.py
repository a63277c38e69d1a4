"""How ranks that share memory notice that another rank has ended, is stopped, or has left the call by an error.

A rank that leaves a call by an error counts the failure on its line of the shared memory and writes the reason there.
Ranks that wait for it see that, and leave the call too. No rank begins the next call before all have left the failed
one, so no rank is ever more than one failure ahead of another.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from labkit.system.errors import RunError
from labkit.system.process_state import ENDED, STOPPED, process_state
from labkit.system.rounding import round_up

from .build import same_in_cpp
from .shared_memory import SharedMemory

LINE = 64  # bytes of a line: struct Arrival of exchange.h
# Places in a line, int32: process id; number of failed calls; number of failed calls that this rank has cleaned up.
PID, FAILED, READY = 2, 3, 4
REASON_BYTES = 1024  # for the reason why a call failed
PAUSE_S = 0.001
LOOK_S = 0.2  # between two checks of the other ranks' processes
LOOKS_STOPPED = 15  # consecutive checks before a stopped rank counts as lost: Ctrl-Z and fg stop all for a moment
same_in_cpp({"sizeof(Arrival)": LINE, "offsetof(Arrival, pid)": 4 * PID, "offsetof(Arrival, failed_calls)": 4 * FAILED})
same_in_cpp({"offsetof(Arrival, ready)": 4 * READY, "kLookEvery": int(LOOK_S * 1e9), "kLooksStopped": LOOKS_STOPPED})
TOGETHER = "all ranks of a model make the same calls, or none goes on"


class LostRankError(RunError):
    """Another rank has ended, is stopped or cannot be reached: the call can't be completed."""


class RankFailedError(RunError):
    """Another rank failed in a call of all ranks; the message says which rank and why. The next call can be made."""


class UnexplainedError(RunError):
    """Another rank has failed, and this one does not know the reason. In a call of all ranks `SharedCalls` replaces the
    error by RankFailedError with the reason.
    """


def lines_bytes(ranks: int) -> int:
    """Bytes at the beginning of the shared memory that `SharedRanks` take, for this number of ranks."""
    return round_up(ranks * (LINE + REASON_BYTES), mmap.PAGESIZE)


class SharedRanks:
    """This rank's view of the ranks that share memory with it. The memory begins with a line for each rank.

    names: numbers of the ranks, for errors. A wait of more than `timeout_s` for a rank raises LostRankError.
    """

    def __init__(self, shared: SharedMemory, rank: int, names: Sequence[int], timeout_s: float) -> None:
        self._memory, self._pids, self._rank, self._names = shared.memory, shared.pids, rank, names
        self._timeout_s, self._looks_stopped = timeout_s, 0
        line = ctypes.c_int32 * (LINE // 4)
        self._lines = (line * len(names)).from_buffer(shared.memory)
        self._lost: str | None = None
        self.failed_calls = 0
        for rank_line, pid in zip(self._lines, shared.pids, strict=True):
            rank_line[PID] = pid

    def look(self, waited_s: float) -> None:
        """Checks the other ranks during a wait. Raises RankFailedError if another rank has left the call by an error,
        and LostRankError if one has ended or is stopped, or if the wait is longer than the limit.
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
            self._give_up(f"no message was received or sent within {self._timeout_s:.0f} s")

    def raise_failure(self) -> None:
        """Raises RankFailedError if another rank has left the call by an error."""
        for rank, line in enumerate(self._lines):
            if line[FAILED] > self.failed_calls:
                begin = self._reason_begin(rank)
                reason = self._memory[begin : begin + REASON_BYTES].partition(b"\0")[0]
                raise RankFailedError(reason.decode(errors="replace"))

    def came(self) -> None:
        """The wait has ended: consecutive checks are counted anew."""
        self._looks_stopped = 0

    def fail_call(self, reason: str) -> None:
        """This rank leaves the call by an error, without waiting for other ranks."""
        begin = self._reason_begin(self._rank)
        self._memory[begin : begin + REASON_BYTES] = reason.encode()[: REASON_BYTES - 1].ljust(REASON_BYTES, b"\0")
        self.failed_calls += 1
        self._lines[self._rank][FAILED] = self.failed_calls

    def begin_call(self, clear: Callable[[], None]) -> None:
        """After a failed call: returns when all ranks have left it and have drained what it left."""
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

    def _give_up(self, reason: str) -> NoReturn:
        self._lost = f"rank {self._names[self._rank]}: {reason}; {TOGETHER}"
        raise LostRankError(self._lost)

    def _reason_begin(self, rank: int) -> int:
        return len(self._lines) * LINE + rank * REASON_BYTES
