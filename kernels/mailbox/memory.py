"""Mailboxes in memory that the ranks of one machine share."""

import ctypes
import mmap
from collections.abc import Callable, Sequence
from time import monotonic

import torch

from labkit.system.rounding import round_up

from .. import build
from ..build import LONG, POINTER
from ..other_ranks import LOOK_S, SharedRanks, lines_bytes
from ..shared_memory import SharedMemory
from .message import HEADER, Message, announced

build.declare("labkit_mailbox_write", POINTER, LONG, POINTER, LONG, LONG, result=True)
build.declare("labkit_mailbox_read", POINTER, LONG, POINTER, LONG, LONG, result=True)

COUNTS = 128  # bytes before the queue: struct Mailbox of mailbox.h
build.same_in_cpp({"sizeof(Mailbox)": COUNTS})


def ring_bytes(ranks: int, capacity: int) -> int:
    """Bytes of shared memory for a mailbox of `capacity` bytes per rank."""
    return lines_bytes(ranks) + ranks * _mailbox_bytes(capacity)


def _mailbox_bytes(capacity: int) -> int:
    return round_up(COUNTS + capacity, mmap.PAGESIZE)


class SharedMailboxes:
    """This rank's two ends of a ring: it sends to the next rank and receives from the previous one.

    names: numbers of the ranks, for errors. The memory has a line for each rank (`SharedRanks`), and then a mailbox for
    each rank, which that rank writes.
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
        """Does nothing: messages are in the shared memory, which stays as long as their reader maps it."""

    def fail_call(self, reason: str) -> None:
        self._others.fail_call(reason)

    def begin_call(self) -> None:
        self._others.begin_call(self._drain)

    def look(self, waited_s: float) -> None:
        """Checks the other ranks during a wait of another kind: raises the errors of `receive`."""
        self._others.look(waited_s)

    def _drain(self) -> None:
        """Drops all bytes that have come in. The previous rank must not be writing."""
        written, read = (ctypes.c_int64.from_address(self._in + offset) for offset in (0, COUNTS // 2))
        read.value = written.value

    def _move(self, move: Callable[..., int], box: int, at: int, count: int) -> None:
        """Moves all `count` bytes. Raises as `SharedRanks.look` if another rank has ended or has left the call."""
        patience = int(LOOK_S * 1e9)
        done = move(box, self._capacity, at, count, patience)
        begun = monotonic()
        while done < count:
            self._others.look(monotonic() - begun)
            if more := move(box, self._capacity, at + done, count - done, patience):
                begun = monotonic()
            done += more
        self._others.came()
