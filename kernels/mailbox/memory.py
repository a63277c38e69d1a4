"""Mailboxes in memory that the ranks of one machine share."""

import ctypes
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import NoReturn

import torch

from .. import build
from ..build import LONG, POINTER
from ..shared_memory import SharedMemory
from .message import HEADER, LostRankError, Message, announced

build.declare("labkit_mailbox_write", POINTER, LONG, POINTER, LONG, LONG, result=True)
build.declare("labkit_mailbox_read", POINTER, LONG, POINTER, LONG, LONG, result=True)

COUNTS = 128  # bytes before the queue: struct Mailbox of mailbox.h
LOOK_S = 0.2  # between two looks at whether the other ranks still live
LOOKS_STOPPED = 10  # in a row, before a stopped rank is given up: all are stopped for a moment by Ctrl-Z and fg


def mailbox_bytes(capacity: int) -> int:
    """Of memory for a mailbox that holds `capacity` bytes."""
    return -(-(COUNTS + capacity) // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedMailboxes:
    """This rank's two ends of a ring: what it sends goes to the rank behind it, what it receives is of the one before.

    names: of the ranks in errors. The memory has a mailbox for each rank, which that rank writes to.
    """

    def __init__(self, shared: SharedMemory, rank: int, names: Sequence[int], capacity: int, timeout_s: float) -> None:
        self._shared, self._rank, self._names, self._capacity = shared, rank, names, capacity
        self._timeout_s, self._library = timeout_s, build.load("float32")
        self._memory = torch.frombuffer(shared.memory, dtype=torch.uint8)
        size = mailbox_bytes(capacity)
        self._out = self._memory[rank * size :].data_ptr()
        self._in = self._memory[(rank - 1) % len(names) * size :].data_ptr()
        self._header = (ctypes.c_char * HEADER.size)()
        self._looks_stopped = 0

    def send(self, message: Message) -> None:
        write, payload = self._library.labkit_mailbox_write, message.payload
        self._header.raw = message.header
        self._move(write, self._out, ctypes.addressof(self._header), HEADER.size)
        self._move(write, self._out, payload.data_ptr(), payload.nbytes)

    def receive(self) -> Message:
        read = self._library.labkit_mailbox_read
        self._move(read, self._in, ctypes.addressof(self._header), HEADER.size)
        message = announced(self._header.raw)
        self._move(read, self._in, message.payload.data_ptr(), message.payload.nbytes)
        return message

    def flush(self) -> None:
        """Nothing is under way: what was sent is in memory that outlives this process as long as its reader has it."""

    def _move(self, move: Callable[..., int], box: int, at: int, count: int) -> None:
        """All of it, however long it takes, unless another rank has gone."""
        patience = int(LOOK_S * 1e9)
        done = move(box, self._capacity, at, count, patience)
        begun = monotonic()
        while done < count:
            self.look(monotonic() - begun)
            if more := move(box, self._capacity, at + done, count - done, patience):
                begun = monotonic()
            done += more
        self._looks_stopped = 0

    def look(self, waited_s: float) -> None:
        """Raises LostRankError where a rank has ended or stands still, or this one has waited for too long."""
        states = [_state(pid) for pid in self._shared.pids]
        self._looks_stopped = self._looks_stopped + 1 if "T" in states else 0
        for rank, state in enumerate(states):
            if state in "XZ":
                self._give_up(f"rank {self._names[rank]} has ended")
            if state == "T" and self._looks_stopped >= LOOKS_STOPPED:
                self._give_up(f"rank {self._names[rank]} is stopped (its process is {self._shared.pids[rank]})")
        if waited_s > self._timeout_s:
            self._give_up(f"no message came, or went, within {self._timeout_s:.0f} s")

    def _give_up(self, why: str) -> NoReturn:
        raise LostRankError(
            f"rank {self._names[self._rank]}: {why}; all ranks of a model make the same calls, or none goes on"
        )


def _state(pid: int) -> str:
    """The letter of /proc: "T" of a process that is stopped, "Z" or "X" of one that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    except PermissionError:
        return "?"
