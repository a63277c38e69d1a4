"""Layers that one thread prefetches from a file into a few slots of memory, pass after pass."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from ctypes import c_uint64
from pathlib import Path
from time import sleep
from typing import NamedTuple

from torch import Tensor

from .. import build
from ..build import INT, LONG, POINTER, fields
from ..slot_stream import ALTERED, ENDS, PAGE, READ_ERROR, SlotStream, StreamSpan

__all__ = ["PAGE", "Block", "LayerStream", "StreamSpan", "descriptor_of", "digest_of"]

LOOK_S = 0.002  # between two checks whether the reader rests

build.declare("labkit_layer_stream_open", INT, POINTER, LONG, POINTER, LONG, LONG, result=True)
build.declare("labkit_digest", POINTER, LONG, result=True)


class Block(NamedTuple):
    """The place of a layer in a file or in memory. In a file, offset and bytes are multiples of PAGE."""

    layer: int
    offset: int
    bytes: int
    digest: int = 0  # XXH64 of the bytes in a file; not used in memory


@build.mirrors("Block")
class CBlock(ctypes.Structure):
    _fields_ = fields((LONG, "layer offset bytes"), (c_uint64, "digest"))


class LayerStream(SlotStream):
    """A stream of blocks of a file, in the order of `blocks`."""

    def __init__(self, library: ctypes.CDLL, path: Path, blocks: Sequence[Block], slots: int) -> None:
        """library: of the kernels that use the slots. Raises OSError if the file can't be opened."""
        super().__init__(library, slots, max(block.bytes for block in blocks))
        self.path, self.blocks = path, tuple(blocks)
        descriptor = descriptor_of(path)
        c_blocks = (CBlock * len(blocks))(*(CBlock(*block) for block in blocks))
        address = library.labkit_layer_stream_open(
            descriptor, ctypes.addressof(c_blocks), len(blocks), self.all_slots.data_ptr(), self.slot_bytes, slots
        )
        self._opened(address, descriptor)

    def begin_pass(self) -> int:
        """The turn of the first block in a new pass."""
        return self._begin_pass(0)

    def release(self, turn: int) -> None:
        """Allows new blocks in the slots of this turn and of earlier turns."""
        self._release(turn, range(0))

    def rest(self) -> None:
        """Returns once all slots are filled for the next pass, so that nothing is read until it begins. Raises RunError
        if a block can't be read.
        """
        while (self.blocks_read - self.slots) % len(self.blocks):
            self.check()
            sleep(LOOK_S)

    def _failure_message(self, failure: int, layer: int, offset: int, reason: str) -> str:
        where = f"layer {layer} of {self.path}"
        again = "copy the file again, or remove its folder so that it is made again"
        return {
            READ_ERROR: f"{where} can't be read at byte {offset}: {reason}; see whether the disk is whole, then go on "
            "or start again",
            ENDS: f"{where} is missing from byte {offset} on: the file was cut short; {again}",
            ALTERED: f"{where} was altered: its digest is not the digest of the save; {again}",
        }[failure]


def digest_of(library: ctypes.CDLL, data: Tensor) -> int:
    """XXH64 of the bytes of a contiguous tensor."""
    digest: int = library.labkit_digest(data.data_ptr(), data.numel() * data.element_size())
    return digest % (1 << 64)


def descriptor_of(path: Path) -> int:
    """A file descriptor that bypasses the page cache if the file system supports that."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
