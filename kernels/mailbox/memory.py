"""Mailboxes in memory that the ranks of one machine share."""

import ctypes
import mmap
from collections.abc import Callable, Sequence
from time import monotonic

import torch

from .. import build
from ..build import LONG, POINTER
from ..other_ranks import LOOK_S, SharedRanks, lines_bytes
from ..shared_memory import SharedMemory
from .message import HEADER, Message, announced

build.declare("labkit_mailbox_write", POINTER, LONG, POINTER, LONG, LONG, result=True)
build.declare("labkit_mailbox_read", POINTER, LONG, POINTER, LONG, LONG, result=True)

COUNTS = 128  # bytes before the queue: struct Mailbox of mailbox.h


def ring_bytes(ranks: int, capacity: int) -> int:
    """Of memory for the mailboxes of so many ranks, each of which holds `capacity` bytes."""
    return lines_bytes(ranks) + ranks * _mailbox_bytes(capacity)


def _mailbox_bytes(capacity: int) -> int:
    return -(-(COUNTS + capacity) // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedMailboxes:
    """This rank's two ends of a ring: what it sends goes to the rank behind it, what it receives is of the one before.

    names: of the ranks in errors. The memory has a line for each rank (`SharedRanks`), and then a mailbox for each,
    which that rank writes to.
    """

    def __init__(self, shared: SharedMemory, rank: int, names: Sequence[int], capacity: int, timeout_s: float) -> None:
        self._others, self._capacity = SharedRanks(shared, rank, names, timeout_s), capacity
        self._library = build.load("float32")
        self._memory = torch.frombuffer(shared.memory, dtype=torch.uint8)[lines_bytes(len(names)) :]
        size = _mailbox_bytes(capacity)
        self._out = self._memory[rank * size :].data_ptr()
        self._in = self._memory[(rank - 1) % len(names) * size :].data_ptr()
        self._header = (ctypes.c_char * HEADER.size)()

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

    def fail_call(self, reason: str) -> None:
        self._others.fail_call(reason)

    def begin_call(self) -> None:
        self._others.begin_call(self._empty)

    def look(self, waited_s: float) -> None:
        """For those that wait for another rank in another way, and have for so long: raises as `receive` would."""
        self._others.look(waited_s)

    def _empty(self) -> None:
        """Nothing of what came in is read any more; the rank before must not be writing."""
        written, read = (ctypes.c_int64.from_address(self._in + place) for place in (0, COUNTS // 2))
        read.value = written.value

    def _move(self, move: Callable[..., int], box: int, at: int, count: int) -> None:
        """All of it, however long it takes, unless another rank has gone or has left the call."""
        patience = int(LOOK_S * 1e9)
        done = move(box, self._capacity, at, count, patience)
        begun = monotonic()
        while done < count:
            self._others.look(monotonic() - begun)
            if more := move(box, self._capacity, at + done, count - done, patience):
                begun = monotonic()
            done += more
        self._others.came()
