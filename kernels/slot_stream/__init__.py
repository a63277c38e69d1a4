"""The common part of streams of weights and of keys and values: slots of memory, turns, spans and failures."""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter_ns
from typing import NamedTuple, Protocol

from torch import Tensor

from labkit.system.errors import RunError

from .. import build
from ..build import LONG, POINTER, fields
from ..memory import reserved
from ..other_ranks import UnexplainedError

__all__ = ["PAGE", "SlotStream", "StreamSpan", "awaited", "closed", "reason_of", "require_opened", "require_whole"]

PAGE = 4096  # reads begin and end at multiples of it
MOST_SPANS = 1 << 16
KINDS = ("read", "wait", "compute", "write")
READ_ERROR, ENDS, ALTERED, WRITE_ERROR = 1, 2, 3, 4
build.same_in_cpp({"kPage": PAGE, "kMostSpans": MOST_SPANS})
build.same_in_cpp({f"k{kind.title()}": number for number, kind in enumerate(KINDS)})
build.same_in_cpp({"kReadError": READ_ERROR, "kEnds": ENDS, "kAltered": ALTERED, "kWriteError": WRITE_ERROR})

build.declare("labkit_stream_close", POINTER)
build.declare("labkit_stream_begin_pass", POINTER, LONG, result=True)
build.declare("labkit_stream_wait", POINTER, LONG)
build.declare("labkit_stream_filled", POINTER, LONG, result=True)
build.declare("labkit_stream_release", POINTER, LONG, LONG, LONG)
build.declare("labkit_stream_flush", POINTER)
build.declare("labkit_stream_note", POINTER, LONG, LONG, LONG, LONG)
build.declare("labkit_stream_pass_failed", POINTER, result=True)
build.declare("labkit_stream_state", POINTER, POINTER)
build.declare("labkit_stream_take_spans", POINTER, POINTER, LONG, result=True)


class StreamSpan(NamedTuple):
    """The time of one activity for a layer, in perf_counter_ns."""

    kind: str  # "read" into a slot, "copy" to a slot on a GPU, "wait" for that, "compute", or "write" from the slot
    layer: int
    begin_ns: int
    end_ns: int


@build.mirrors("Span")
class CSpan(ctypes.Structure):
    _fields_ = fields((LONG, "kind layer begin_ns end_ns"))


@build.mirrors("StreamState")
class CState(ctypes.Structure):
    _fields_ = fields(
        (LONG, "blocks_read bytes_read read_ns"),
        (LONG, "blocks_written bytes_written"),
        (LONG, "direct"),
        (LONG, "failure error_number failed_layer failed_offset"),
    )


class SlotStream:
    """Blocks of a file, one per layer, that one thread reads into `slots` pieces of memory in turn.

    A pass uses every block once, in order. Once it has begun, block i has turn first + i: `wait` for it, use
    `memory(turn)`, then release it. The thread goes on with the blocks of the next pass. It begins at once, and ends
    with this object or `close`.

    all_slots: uint8 [slots * slot_bytes]. Reads bypass the page cache (O_DIRECT). If the file system refuses that,
    pages are dropped from the cache after reading.
    """

    def __init__(self, library: ctypes.CDLL, slots: int, slot_bytes: int) -> None:
        """library: of the kernels that use the slots. A derived class opens the stream and calls `_opened`."""
        self.slots, self.slot_bytes, self._library = slots, slot_bytes, library
        self.all_slots = reserved(slots * slot_bytes)
        self.address = 0

    def _opened(self, address: int, descriptor: int) -> None:
        """Keeps the stream's address, and closes the stream with this object. descriptor: of the file; it is closed
        after the threads have ended. Raises RunError if there is no stream.
        """
        require_opened(address, descriptor)
        self.address = address
        self.close = weakref.finalize(
            self, closed, self._library.labkit_stream_close, address, descriptor, self.all_slots
        )

    def memory(self, turn: int) -> Tensor:
        """uint8 [slot_bytes]: the slot of a turn."""
        begin = turn % self.slots * self.slot_bytes
        return self.all_slots[begin : begin + self.slot_bytes]

    def wait(self, turn: int) -> None:
        """Returns once the turn's slot is filled, or the pass has failed; `check` then raises the error."""
        self._library.labkit_stream_wait(self.address, turn)

    def filled(self, turn: int) -> bool:
        """Whether `wait` would find the turn's slot filled."""
        return bool(self._library.labkit_stream_filled(self.address, turn))

    def note(self, kind: str, layer: int, begin_ns: int, end_ns: int) -> None:
        """Adds a span to the spans of `take_spans`."""
        self._library.labkit_stream_note(self.address, KINDS.index(kind), layer, begin_ns, end_ns)

    def take_spans(self) -> list[StreamSpan]:
        """Spans since the last call, the latest 65,536 at most."""
        spans = (CSpan * MOST_SPANS)()
        count = self._library.labkit_stream_take_spans(self.address, ctypes.addressof(spans), MOST_SPANS)
        return [StreamSpan(KINDS[span.kind], span.layer, span.begin_ns, span.end_ns) for span in spans[:count]]

    @property
    def blocks_read(self) -> int:
        """Number of blocks read since the beginning."""
        return int(self._state().blocks_read)

    @property
    def bytes_read(self) -> int:
        return int(self._state().bytes_read)

    @property
    def read_s(self) -> float:
        """Seconds spent reading since the beginning."""
        return float(self._state().read_ns / 1e9)

    @property
    def failed(self) -> bool:
        """Whether a block could not be read or written since the pass began."""
        return bool(self._state().failure)

    @property
    def pass_failed(self) -> bool:
        """Whether a block of this pass could not be read, or an earlier block could not be written. Blocks that are
        read ahead for the next pass do not count.
        """
        return bool(self._library.labkit_stream_pass_failed(self.address))

    @property
    def direct(self) -> bool:
        """Whether reads bypass the page cache."""
        return bool(self._state().direct)

    def check(self) -> None:
        """Raises RunError if the pass has failed: its results are invalid."""
        state = self._state()
        if state.failure:
            reason = reason_of(state.error_number)
            raise RunError(self._failure_message(state.failure, state.failed_layer, state.failed_offset, reason))

    def _failure_message(self, failure: int, layer: int, offset: int, reason: str) -> str:
        """Says what failed, and what to do."""
        raise NotImplementedError

    def _begin_pass(self, committed: int) -> int:
        """The turn of the first block in a new pass. committed: tokens whose keys and values count as cached."""
        first: int = self._library.labkit_stream_begin_pass(self.address, committed)
        return first

    def _release(self, turn: int, written: range) -> None:
        self._library.labkit_stream_release(self.address, turn, written.start, written.stop)

    def _state(self) -> CState:
        state = CState()
        self._library.labkit_stream_state(self.address, ctypes.addressof(state))
        return state


class Checked(Protocol):
    """What a step asks when it is over; for the calls see `SlotStream`."""

    @property
    def pass_failed(self) -> bool: ...

    def check(self) -> None: ...


class Fetching(Checked, Protocol):
    """The part of a stream's interface that a step uses; for the calls see `SlotStream`."""

    def wait(self, turn: int) -> None: ...

    def note(self, kind: str, layer: int, begin_ns: int, end_ns: int) -> None: ...


@contextmanager
def awaited(stream: Fetching, turn: int, layer: int, waiting: AbstractContextManager[object]) -> Iterator[None]:
    """A context that begins once the turn's slot is filled; `waiting` surrounds the wait. Adds the wait and the time in
    the context to the stream's spans.
    """
    called = perf_counter_ns()
    with waiting:
        stream.wait(turn)
    begin = perf_counter_ns()
    yield
    stream.note("wait", layer, called, begin)
    stream.note("compute", layer, begin, perf_counter_ns())


def require_whole(streams: Iterable[Checked], failed: bool) -> None:
    """Raises RunError if a pass has failed: UnexplainedError if only streams of other ranks have failed.

    failed: whether the pass of any rank had failed at its end.
    """
    if not failed:
        return
    for stream in streams:
        stream.check()
    raise UnexplainedError("another rank could not read its layers; its message says why: try again once it can")


def reason_of(error_number: int) -> str:
    """An error of the system in words, with its name."""
    return f"{os.strerror(error_number)} ({errno.errorcode.get(error_number, error_number)})"


def require_opened(address: int, descriptor: int) -> None:
    """Closes the descriptor and raises RunError if there is nothing at the address that C++ returned."""
    if address:
        return
    os.close(descriptor)
    raise RunError(
        "a stream from a file could not start: the system has no memory or no thread left; close other "
        "programs, or raise the limits that `ulimit -v` and `ulimit -u` show"
    )


def closed(close: Callable[[int], object], address: int, descriptor: int, memory: Tensor) -> None:
    """Ends the threads of a stream, which use `memory` until then. close: the function of C++."""
    close(address)
    os.close(descriptor)
    del memory
