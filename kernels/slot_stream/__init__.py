"""What streams of weights and of keys and values have in common: slots of memory, turns, spans, and what went wrong."""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import c_int64
from time import perf_counter_ns
from typing import NamedTuple, Protocol

from torch import Tensor

from labkit.system.errors import RunError

from .. import build
from ..build import LONG, POINTER
from ..memory import reserved

__all__ = ["PAGE", "SlotStream", "StreamSpan", "awaited", "require_whole"]

PAGE = 4096  # kPage of direct_file.h: what is read begins and ends at multiples of it
MOST_SPANS = 1 << 16
KINDS = ("read", "wait", "compute", "write")
READ_ERROR, ENDS, ALTERED, WRITE_ERROR = 1, 2, 3, 4

build.declare("labkit_stream_close", POINTER)
build.declare("labkit_stream_begin_pass", POINTER, LONG, result=True)
build.declare("labkit_stream_wait", POINTER, LONG)
build.declare("labkit_stream_filled", POINTER, LONG, result=True)
build.declare("labkit_stream_release", POINTER, LONG, LONG, LONG)
build.declare("labkit_stream_flush", POINTER)
build.declare("labkit_stream_note", POINTER, LONG, LONG, LONG, LONG)
build.declare("labkit_stream_state", POINTER, POINTER)
build.declare("labkit_stream_take_spans", POINTER, POINTER, LONG, result=True)


class StreamSpan(NamedTuple):
    """What was done when with a layer: "read" into a slot, "copy" to a slot on a GPU, "wait" for that, "compute", or
    "write" from the slot; perf_counter_ns.
    """

    kind: str
    layer: int
    begin_ns: int
    end_ns: int


@build.mirrors("Span")
class CSpan(ctypes.Structure):
    _fields_ = [("kind", c_int64), ("layer", c_int64), ("begin_ns", c_int64), ("end_ns", c_int64)]


@build.mirrors("StreamState")
class CState(ctypes.Structure):
    _fields_ = [
        ("blocks_read", c_int64),
        ("bytes_read", c_int64),
        ("read_ns", c_int64),
        ("blocks_written", c_int64),
        ("bytes_written", c_int64),
        ("write_ns", c_int64),
        ("direct", c_int64),
        ("failure", c_int64),
        ("error_number", c_int64),
        ("failed_layer", c_int64),
        ("failed_offset", c_int64),
    ]


class SlotStream:
    """Pieces of a file, one of each layer, in `slots` pieces of memory, which one thread fills in turn.

    A pass uses every piece once, in order. After it has begun piece i has turn first + i; `wait` for it, use
    `memory(turn)`, then release it. The thread goes on with the pieces of the next pass. It begins at once, and ends
    with this object or `close`.

    all_slots: uint8 [slots * slot_bytes]. The page cache is passed by (O_DIRECT), or where the file system refuses
    that, nothing is left there.
    """

    def __init__(self, library: ctypes.CDLL, slots: int, slot_bytes: int) -> None:
        """library: of the kernels that use the slots. A derived class says with `_opened` which stream it is."""
        self.slots, self.slot_bytes, self._library = slots, slot_bytes, library
        self.all_slots = reserved(slots * slot_bytes)
        self.address = 0

    def _opened(self, address: int, descriptor: int) -> None:
        """descriptor: of the file; it is closed behind the threads."""
        self.address = address
        self.close = weakref.finalize(self, _closed, self._library, address, descriptor, self.all_slots)

    def memory(self, turn: int) -> Tensor:
        """uint8 [slot_bytes]: the slot of a turn."""
        begin = turn % self.slots * self.slot_bytes
        return self.all_slots[begin : begin + self.slot_bytes]

    def wait(self, turn: int) -> None:
        """Returns once the turn's slot is filled, or the pass has failed, which `check` tells."""
        self._library.labkit_stream_wait(self.address, turn)

    def filled(self, turn: int) -> bool:
        """Whether `wait` would find the turn's slot filled."""
        return bool(self._library.labkit_stream_filled(self.address, turn))

    def note(self, kind: str, layer: int, begin_ns: int, end_ns: int) -> None:
        """Adds a span to those that `take_spans` gives."""
        self._library.labkit_stream_note(self.address, KINDS.index(kind), layer, begin_ns, end_ns)

    def take_spans(self) -> list[StreamSpan]:
        """What was done since the last call, the latest 65,536 at most."""
        found = (CSpan * MOST_SPANS)()
        count = self._library.labkit_stream_take_spans(self.address, ctypes.addressof(found), MOST_SPANS)
        return [StreamSpan(KINDS[each.kind], each.layer, each.begin_ns, each.end_ns) for each in found[:count]]

    @property
    def blocks_read(self) -> int:
        """So many pieces have been read since the beginning."""
        return int(self._state().blocks_read)

    @property
    def bytes_read(self) -> int:
        return int(self._state().bytes_read)

    @property
    def read_s(self) -> float:
        """Seconds that were spent reading, of those since the beginning."""
        return float(self._state().read_ns / 1e9)

    @property
    def failed(self) -> bool:
        """Whether a piece of this pass could not be read, or one before it not be written."""
        return bool(self._state().failure)

    @property
    def direct(self) -> bool:
        """Whether the page cache is passed by."""
        return bool(self._state().direct)

    def check(self) -> None:
        """Raises RunError where the pass has failed: what was computed in it is worth nothing."""
        state = self._state()
        if state.failure:
            number = int(state.error_number)
            reason = f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"
            raise RunError(self._said(state.failure, state.failed_layer, state.failed_offset, reason))

    def _said(self, failure: int, layer: int, offset: int, reason: str) -> str:
        """What went wrong, and what to do about it."""
        raise NotImplementedError

    def _begin_pass(self, held: int) -> int:
        """The turn of the first piece in a new pass. held: tokens whose keys and values count."""
        first: int = self._library.labkit_stream_begin_pass(self.address, held)
        return first

    def _release(self, turn: int, written: range) -> None:
        self._library.labkit_stream_release(self.address, turn, written.start, written.stop)

    def _state(self) -> CState:
        state = CState()
        self._library.labkit_stream_state(self.address, ctypes.addressof(state))
        return state


class Fetching(Protocol):
    """What a step asks of a stream of any kind; for the calls see `SlotStream`."""

    @property
    def failed(self) -> bool: ...

    def wait(self, turn: int) -> None: ...

    def note(self, kind: str, layer: int, begin_ns: int, end_ns: int) -> None: ...

    def check(self) -> None: ...


@contextmanager
def awaited(stream: Fetching, turn: int, layer: int, waiting: AbstractContextManager[object]) -> Iterator[None]:
    """Begins once the turn's slot is filled, which is waited for within `waiting`. The wait, and the time within, are
    spans of the stream.
    """
    wanted = perf_counter_ns()
    with waiting:
        stream.wait(turn)
    begin = perf_counter_ns()
    yield
    stream.note("wait", layer, wanted, begin)
    stream.note("compute", layer, begin, perf_counter_ns())


def require_whole(streams: Iterable[Fetching], all_ranks: bool) -> None:
    """Raises RunError unless these streams, and `all_ranks`, came through this pass."""
    for stream in streams:
        stream.check()
    if not all_ranks:
        raise RunError("another rank could not read its layers, and its message says why; try again once it can")


def _closed(library: ctypes.CDLL, address: int, descriptor: int, memory: Tensor) -> None:
    """Ends the threads, which use `memory` until then."""
    library.labkit_stream_close(address)
    os.close(descriptor)
    del memory
