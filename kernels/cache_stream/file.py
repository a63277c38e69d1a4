"""A file of keys and values: how they stand in it, and how they go from one into another.

B batch, H KV heads, C capacity, D padded head_dim.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.system.errors import RunError, UserError

from ..int8_cache import SCALE_DTYPE
from ..memory import reserved
from ..slot_stream import PAGE
from ..types import LayerCache

AT_ONCE = 4 << 20  # bytes that are copied from one file to another together


class Section(NamedTuple):
    """`rows` of one layer, each of `row_bytes`, a multiple of PAGE, in which a token has `token_bytes`.

    In memory one row stands behind the other. In the file the first pages of all rows come first, then the second ones.
    """

    rows: int
    row_bytes: int
    token_bytes: int

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class CacheShape:
    """Of the keys and values of `layers`: [B, H, C, D] each, of `dtype`; beside int8 their scales [B, H, C]."""

    layers: int
    batch: int
    heads: int
    capacity: int
    dim: int
    dtype: torch.dtype

    @classmethod
    def fitting(cls, layers: int, batch: int, heads: int, capacity: int, dim: int, dtype: torch.dtype) -> CacheShape:
        """With the least capacity from the given one on for which every row is whole pages."""
        step = math.lcm(*(PAGE // math.gcd(PAGE, size) for size in _token_bytes(dim, dtype)))
        return cls(layers, batch, heads, -(-capacity // step) * step, dim, dtype)

    @property
    def sections(self) -> tuple[Section, ...]:
        """Keys and values, then scales: of each first those of all keys, then those of all values."""
        rows, sizes = 2 * self.batch * self.heads, _token_bytes(self.dim, self.dtype)
        return tuple(Section(rows, self.capacity * size, size) for size in sizes)

    @property
    def layer_bytes(self) -> int:
        """Of one layer, in the file and in a slot."""
        return sum(each.bytes for each in self.sections)

    def pass_bytes(self, sequences: int, tokens: int) -> int:
        """That a pass over all layers reads of so many sequences with so many tokens each."""
        pages = sum(-(-tokens * size // PAGE) for size in _token_bytes(self.dim, self.dtype))
        return 2 * self.layers * sequences * self.heads * pages * PAGE

    def layer(self, memory: Tensor, past: int) -> LayerCache:
        """The layer that stands in uint8 [layer_bytes], with `past` tokens in it."""
        slots = (self.batch, self.heads, self.capacity)
        numbers, *scales = memory.split([each.bytes for each in self.sections])
        keys, values = numbers.view(self.dtype).view(2, *slots, self.dim)
        if not scales:
            return LayerCache(keys, values, past)
        key_scales, value_scales = scales[0].view(SCALE_DTYPE).view(2, *slots)
        return LayerCache(keys, values, past, None, key_scales, value_scales)


def _token_bytes(dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """In a row of keys or values, and in one of their scales if they have any."""
    numbers = dim * dtype.itemsize
    return (numbers, SCALE_DTYPE.itemsize) if dtype == torch.int8 else (numbers,)


class CacheFile:
    """Keys and values of all layers, zeros at first, in a file without a name, which ends with this object.

    A process that is killed leaves nothing behind.
    """

    def __init__(self, folder: Path, shape: CacheShape) -> None:
        """Raises UserError where the folder can't be written, or has too little room."""
        self.folder, self.shape = folder, shape
        size = shape.layers * shape.layer_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  it lives with this object
        except OSError as error:
            raise UserError(
                f"kv_offload: {folder} can't be written ({error.strerror or error}); name another folder as path"
            ) from error
        self._reserve(size)
        with suppress(OSError):  # a file system that refuses it is used through the page cache
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) | os.O_DIRECT)

    def _reserve(self, size: int) -> None:
        free = shutil.disk_usage(self.folder).free
        try:
            if free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as error:
            shape = self.shape
            raise UserError(
                f"kv_offload: {self.folder} has {free / 1e9:.3g} GB free, and keys and values of {shape.batch} x "
                f"{shape.capacity} tokens take {size / 1e9:.3g} GB ({error.strerror}); free some, or name "
                "another folder as path"
            ) from error

    def descriptor(self) -> int:
        """A new one of this file, for reading and writing past the page cache where the file system takes that."""
        return os.dup(self._file.fileno())

    @property
    def direct(self) -> bool:
        """Whether the page cache is passed by."""
        return bool(fcntl.fcntl(self._file, fcntl.F_GETFL) & os.O_DIRECT)

    def copied(self, rows: Tensor, capacity: int, tokens: int) -> CacheFile:
        """A file of the sequences `rows` of this one, see `gathered`."""
        return self.gathered([self], rows, capacity, tokens)

    @classmethod
    def gathered(cls, files: Sequence[CacheFile], rows: Tensor, capacity: int, tokens: int) -> CacheFile:
        """A file of the sequences `rows` (int64) of files of one shape but for their batch, counted through all of
        them, with room for `capacity` tokens, of which the first `tokens` are filled.

        Raises UserError as a new file does, and RunError where one can't be read or written.
        """
        old = files[0].shape
        made = cls(files[0].folder, CacheShape.fitting(old.layers, len(rows), old.heads, capacity, old.dim, old.dtype))
        made._take(files, rows, tokens)
        return made

    def shrunk(self, rows: Tensor, tokens: int) -> CacheFile:
        """This file with the sequences `rows` alone, in the order given, of which there are no more than before: every
        page moves to an earlier place, so that no room is needed. This object is not to be used any more, and where it
        fails with RunError neither is the file.
        """
        made = copy(self)
        made.shape = replace(self.shape, batch=len(rows))
        made._take([self], rows, tokens)
        os.ftruncate(made._file.fileno(), made.shape.layers * made.shape.layer_bytes)
        return made

    def _take(self, files: Sequence[CacheFile], rows: Tensor, tokens: int) -> None:
        """Fills the first tokens of all layers with those of other files' sequences."""
        shapes = [file.shape for file in files]
        try:
            for layer in range(self.shape.layers):
                at, to = [layer * shape.layer_bytes for shape in shapes], layer * self.shape.layer_bytes
                for mine, *theirs in zip(self.shape.sections, *(shape.sections for shape in shapes), strict=True):
                    self._take_pages(files, at, to, -(-tokens * mine.token_bytes // PAGE), rows)
                    at = [begin + each.bytes for begin, each in zip(at, theirs, strict=True)]
                    to += mine.bytes
        except OSError as error:
            raise RunError(
                f"keys and values of layer {layer} can't be copied in {self.folder}: {error.strerror}; see whether the "
                "disk is whole, then go on"
            ) from error

    def _take_pages(self, files: Sequence[CacheFile], at: list[int], to: int, pages: int, rows: Tensor) -> None:
        """Takes the first `pages` of every row of a section, which stands at `at` in the files and at `to` here."""
        wide = self.shape.heads * PAGE  # the n-th pages of one sequence's keys, or of its values
        have, want = [2 * file.shape.batch * wide for file in files], 2 * len(rows) * wide
        step = max(1, AT_ONCE // sum(have))
        for first in range(0, pages, step):
            count, found = min(step, pages - first), []
            for file, begin, size in zip(files, at, have, strict=True):
                part = reserved(count * size)
                _move(os.preadv, file._file.fileno(), part, begin + first * size)
                found.append(part.view(2 * count, file.shape.batch, wide))
            whole, taken = found[0] if len(found) == 1 else torch.cat(found, dim=1), reserved(count * want)
            torch.index_select(whole, 1, rows, out=taken.view(2 * count, len(rows), wide))
            _move(os.pwritev, self._file.fileno(), taken, to + first * want)
            for file in (*files, self):
                file._leave_page_cache()

    def _leave_page_cache(self) -> None:
        if not self.direct:
            os.fdatasync(self._file.fileno())
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _move(how: Callable[[int, list[Any], int], int], descriptor: int, memory: Tensor, offset: int) -> None:
    """Fills memory from a file or the other way round. Raises OSError where the file ends."""
    left = memory.numpy()
    while len(left):
        moved = how(descriptor, [left], offset)
        if moved == 0:
            raise OSError(errno.EIO, "the file was cut short")
        left, offset = left[moved:], offset + moved
