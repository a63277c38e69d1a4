"""Layers read from a file ahead of their use, pass after pass, into a few slots of memory by one thread."""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Sequence
from ctypes import c_int64, c_uint64
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from labkit.system.errors import RunError

from .. import build
from ..build import INT, LONG, POINTER
from ..memory import reserved

__all__ = ["PAGE", "Block", "LayerStream", "StreamSpan", "digest_of"]

PAGE = 4096  # kPage of stream.h: blocks begin and end at multiples of it
READ_BYTES = 4 << 20
MOST_SPANS = 1 << 16
KINDS = ("read", "wait", "compute")

build.declare("labkit_stream_open", INT, POINTER, LONG, POINTER, LONG, LONG, LONG, result=True)
build.declare("labkit_stream_close", POINTER)
build.declare("labkit_stream_begin_pass", POINTER, result=True)
build.declare("labkit_stream_wait", POINTER, LONG)
build.declare("labkit_stream_filled", POINTER, LONG, result=True)
build.declare("labkit_stream_release", POINTER, LONG)
build.declare("labkit_stream_note", POINTER, LONG, LONG, LONG, LONG)
build.declare("labkit_stream_state", POINTER, POINTER)
build.declare("labkit_stream_take_spans", POINTER, POINTER, LONG, result=True)
build.declare("labkit_digest", POINTER, LONG, result=True)


class Block(NamedTuple):
    """Where a layer stands: in a file, offset and bytes are multiples of PAGE, and digest is the XXH64 of these bytes;
    or in memory, where nothing compares them with a digest.
    """

    layer: int
    offset: int
    bytes: int
    digest: int = 0


class StreamSpan(NamedTuple):
    """What was done when with a layer: "read" into a slot, "copy" to a slot on a GPU, "wait" for that, or "compute";
    perf_counter_ns.
    """

    kind: str
    layer: int
    begin_ns: int
    end_ns: int


class CBlock(ctypes.Structure):
    _fields_ = [("layer", c_int64), ("offset", c_int64), ("bytes", c_int64), ("digest", c_uint64)]


class CSpan(ctypes.Structure):
    _fields_ = [("kind", c_int64), ("layer", c_int64), ("begin_ns", c_int64), ("end_ns", c_int64)]


class CState(ctypes.Structure):
    _fields_ = [
        ("blocks_read", c_int64),
        ("bytes_read", c_int64),
        ("read_ns", c_int64),
        ("direct", c_int64),
        ("failure", c_int64),
        ("error_number", c_int64),
        ("failed_layer", c_int64),
        ("failed_offset", c_int64),
    ]


class LayerStream:
    """The blocks of a file in `slots` pieces of memory, which one thread fills in turn.

    A pass uses every block once, in the order given. After `begin_pass` block i has turn first + i; `wait` for it, use
    `memory(turn)`, then `release` it. The thread goes on with the blocks of the next pass. It begins at once, and ends
    with this object or `close`.

    The page cache is passed by (O_DIRECT), or where the file system refuses that, nothing is left there.
    """

    def __init__(self, library: ctypes.CDLL, path: Path, blocks: Sequence[Block], slots: int) -> None:
        """library: of the kernels that use the slots. Raises OSError where the file can't be opened."""
        self.path, self.blocks, self.slots, self._library = path, tuple(blocks), slots, library
        self.slot_bytes = max(block.bytes for block in blocks)
        self.all_slots = reserved(slots * self.slot_bytes)
        descriptor = _opened(path)
        c_blocks = (CBlock * len(blocks))(*(CBlock(*block) for block in blocks))
        self.address: int = library.labkit_stream_open(
            descriptor,
            ctypes.addressof(c_blocks),
            len(blocks),
            self.all_slots.data_ptr(),
            self.slot_bytes,
            slots,
            READ_BYTES,
        )
        self.close = weakref.finalize(self, _closed, library, self.address, descriptor, self.all_slots)

    def memory(self, turn: int) -> Tensor:
        """uint8 [slot_bytes]: the slot of a turn."""
        begin = turn % self.slots * self.slot_bytes
        return self.all_slots[begin : begin + self.slot_bytes]

    def begin_pass(self) -> int:
        """The turn of the first block in a new pass."""
        first: int = self._library.labkit_stream_begin_pass(self.address)
        return first

    def wait(self, turn: int) -> None:
        """Returns once the turn's slot is filled, or the pass has failed, which `check` tells."""
        self._library.labkit_stream_wait(self.address, turn)

    def filled(self, turn: int) -> bool:
        """Whether `wait` would find the turn's slot filled."""
        return bool(self._library.labkit_stream_filled(self.address, turn))

    def release(self, turn: int) -> None:
        """The slots of this turn and of those before it may be filled anew."""
        self._library.labkit_stream_release(self.address, turn)

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
        """So many blocks have been read since the beginning."""
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
        """Whether a block of this pass could not be read."""
        return bool(self._state().failure)

    @property
    def direct(self) -> bool:
        """Whether the page cache is passed by."""
        return bool(self._state().direct)

    def check(self) -> None:
        """Raises RunError where a block of this pass could not be read: what was computed with it is worth nothing."""
        state = self._state()
        if not state.failure:
            return
        where = f"layer {state.failed_layer} of {self.path}"
        number = int(state.error_number)
        again = "copy the file again, or remove its folder so that it is made again"
        raise RunError(
            {
                1: f"{where} can't be read at byte {state.failed_offset}: {os.strerror(number)} "
                f"({errno.errorcode.get(number, number)}); see whether the disk is whole, then go on or start again",
                2: f"{where} is missing from byte {state.failed_offset} on: the file was cut short; {again}",
                3: f"{where} was altered: its digest is not the one that was written; {again}",
            }[state.failure]
        )

    def _state(self) -> CState:
        state = CState()
        self._library.labkit_stream_state(self.address, ctypes.addressof(state))
        return state


def digest_of(library: ctypes.CDLL, data: Tensor) -> int:
    """XXH64 of the bytes of a contiguous tensor."""
    found: int = library.labkit_digest(data.data_ptr(), data.numel() * data.element_size())
    return found % (1 << 64)


def _opened(path: Path) -> int:
    """A descriptor that reads past the page cache, where the file system takes that."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _closed(library: ctypes.CDLL, address: int, descriptor: int, memory: Tensor) -> None:
    """Ends the thread, which writes to `memory` until then."""
    library.labkit_stream_close(address)
    os.close(descriptor)
    del memory
