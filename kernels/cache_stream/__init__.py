"""Keys and values that are offloaded to a file and pass through slots of memory, layer by layer, pass after pass.

One thread prefetches a layer's keys and values before its turn, another writes its changes after the turn.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from .. import build
from ..build import INT, LONG, POINTER, fields
from ..slot_stream import ENDS, READ_ERROR, WRITE_ERROR, Fetching, SlotStream, awaited
from ..types import LayerCache
from .file import CacheFile, CacheShape

__all__ = ["CacheFile", "CachePass", "CacheShape", "CacheStream"]

build.declare("labkit_cache_stream_open", INT, LONG, POINTER, LONG, LONG, POINTER, LONG, LONG, result=True)


@build.mirrors("Section")
class CSection(ctypes.Structure):
    _fields_ = fields((LONG, "rows row_bytes token_bytes"))


class CacheStream(SlotStream):
    """The layers of a file of keys and values. Besides the slots it takes at most 8 MiB for reads and writes."""

    def __init__(self, library: ctypes.CDLL, file: CacheFile, slots: int, filled: int) -> None:
        """filled: tokens of every layer that are in the file. library: of the kernels that use the slots."""
        shape = file.shape
        super().__init__(library, slots, shape.layer_bytes)
        self.file = file
        descriptor = file.descriptor()
        sections = (CSection * len(shape.sections))(*(CSection(*section) for section in shape.sections))
        address = library.labkit_cache_stream_open(
            descriptor,
            shape.layers,
            ctypes.addressof(sections),
            len(sections),
            filled,
            self.all_slots.data_ptr(),
            self.slot_bytes,
            slots,
        )
        self._opened(address, descriptor)

    def begin_pass(self, written: range) -> CachePass:
        """A pass that writes the tokens `written` of every sequence; later tokens do not count as cached."""
        return CachePass(self, self._begin_pass(written.start), written)

    def release(self, turn: int, written: range) -> None:
        """Allows the next layer in the turn's slot, once these tokens are in the file."""
        self._release(turn, written)

    def layer(self, turn: int, past: int) -> LayerCache:
        """The layer in the turn's slot, with `past` tokens in it."""
        return self.file.shape.layer(self.memory(turn), past)

    def flush(self) -> None:
        """Returns once all released tokens are in the file. Raises RunError if they can't be written."""
        self._library.labkit_stream_flush(self.address)
        if self._state().failure == WRITE_ERROR:
            self.check()

    @property
    def blocks_written(self) -> int:
        """Number of writes of a layer's tokens since the beginning."""
        return int(self._state().blocks_written)

    @property
    def bytes_written(self) -> int:
        return int(self._state().bytes_written)

    def _failure_message(self, failure: int, layer: int, offset: int, reason: str) -> str:
        where = f"keys and values of layer {layer}, which are in a file in {self.file.folder},"
        return {
            READ_ERROR: f"{where} can't be read at byte {offset}: {reason}; see whether the disk is whole, then go on",
            ENDS: f"{where} are missing from byte {offset} on: the file was cut short; begin the text anew",
            WRITE_ERROR: f"{where} can't be written at byte {offset}: {reason}; see whether the disk is full or "
            "broken, then go on: until then they stay in memory",
        }[failure]


class PassedCaches(Fetching, Protocol):
    """A stream of keys and values, from a file or from the host's memory to a GPU; for the calls see `CacheStream`."""

    def layer(self, turn: int, past: int) -> LayerCache: ...

    def release(self, turn: int, written: range) -> None: ...


@dataclass(frozen=True)
class CachePass:
    """One pass over the layers: layer i has turn first + i, and the tokens `written` of every sequence are written."""

    stream: PassedCaches
    first: int
    written: range

    def wait(self, layer: int) -> None:
        """Returns once the layer's keys and values are in their slot, or the pass has failed."""
        self.stream.wait(self.first + layer)

    def layer(self, layer: int) -> LayerCache:
        """The layer's keys and values, after `wait`."""
        return self.stream.layer(self.first + layer, self.written.start)

    def release(self, layer: int) -> None:
        self.stream.release(self.first + layer, self.written)

    @contextmanager
    def resident(self, layer: int, waiting: AbstractContextManager[object]) -> Iterator[LayerCache]:
        """A context with the layer's keys and values in memory; `waiting` surrounds the wait for them."""
        with awaited(self.stream, self.first + layer, layer, waiting):
            yield self.layer(layer)
            self.release(layer)

    def layers_in_order(self, layers: int) -> Iterator[LayerCache]:
        """The layers one after the other, each in memory until the next. Raises RunError if one can't be read."""
        for index in range(layers):
            with self.resident(index, nullcontext()) as layer:
                self.stream.check()
                yield layer
