"""The layout of a file of keys and values, and copies from one file into another.

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
from labkit.system.output_folder import reason
from labkit.system.rounding import ceil_div, round_up

from ..int8_cache import SCALE_DTYPE
from ..memory import reserved
from ..slot_stream import PAGE
from ..types import LayerCache

AT_ONCE = 4 << 20  # bytes that are copied from one file to another together


class Section(NamedTuple):
    """`rows` of one layer, each of `row_bytes`, a multiple of PAGE, with `token_bytes` for a token.

    In memory the rows are consecutive. In the file the first pages of all rows come first, then the second pages.
    """

    rows: int
    row_bytes: int
    token_bytes: int

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class CacheShape:
    """The shape of the keys and values of `layers`: [B, H, C, D] each, of `dtype`; int8 has scales [B, H, C] too."""

    layers: int
    batch: int
    heads: int
    capacity: int
    dim: int
    dtype: torch.dtype

    @classmethod
    def fitting(cls, layers: int, batch: int, heads: int, capacity: int, dim: int, dtype: torch.dtype) -> CacheShape:
        """The shape with the least capacity, from `capacity` on, at which every row is whole pages."""
        step = math.lcm(*(PAGE // math.gcd(PAGE, size) for size in _token_bytes(dim, dtype)))
        return cls(layers, batch, heads, round_up(capacity, step), dim, dtype)

    @property
    def sections(self) -> tuple[Section, ...]:
        """The sections of numbers and, if any, of scales. Each has the rows of all keys, then of all values."""
        rows, sizes = 2 * self.batch * self.heads, _token_bytes(self.dim, self.dtype)
        return tuple(Section(rows, self.capacity * size, size) for size in sizes)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer, in the file and in a slot."""
        return sum(section.bytes for section in self.sections)

    def pass_bytes(self, sequences: int, tokens: int) -> int:
        """Bytes that a pass over all layers reads, for this number of sequences and of tokens in each."""
        pages = sum(ceil_div(tokens * size, PAGE) for size in _token_bytes(self.dim, self.dtype))
        return 2 * self.layers * sequences * self.heads * pages * PAGE

    def layer(self, memory: Tensor, past: int) -> LayerCache:
        """The layer in `memory`, uint8 [layer_bytes], with `past` tokens in it."""
        slots = (self.batch, self.heads, self.capacity)
        numbers, *scales = memory.split([section.bytes for section in self.sections])
        keys, values = numbers.view(self.dtype).view(2, *slots, self.dim)
        if not scales:
            return LayerCache(keys, values, past)
        key_scales, value_scales = scales[0].view(SCALE_DTYPE).view(2, *slots)
        return LayerCache(keys, values, past, None, key_scales, value_scales)


def _token_bytes(dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Bytes of a token in a row of keys or values, and in a row of their scales if they have any."""
    numbers = dim * dtype.itemsize
    return (numbers, SCALE_DTYPE.itemsize) if dtype == torch.int8 else (numbers,)


class CacheFile:
    """Keys and values of all layers, zeros at first, in a file without a name, which is deleted with this object.

    A killed process leaves no file.
    """

    def __init__(self, folder: Path, shape: CacheShape) -> None:
        """Raises UserError if the folder can't be written, or has too little room."""
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
        with suppress(OSError):  # if the file system refuses it, the page cache is used
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) | os.O_DIRECT)

    def _reserve(self, size: int) -> None:
        free = shutil.disk_usage(self.folder).free
        try:
            if free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as error:
            content = f"keys and values of {self.shape.batch} x {self.shape.capacity} tokens"
            if error.errno == errno.ENOSPC:
                raise UserError(
                    f"kv_offload: {self.folder} has {free / 1e9:.3g} GB free, and {content} take {size / 1e9:.3g} GB "
                    f"({error.strerror}); free some, or name another folder as path"
                ) from error
            raise UserError(
                f"kv_offload: {content} need a file of {size / 1e6:,.3g} MB in {self.folder}, which cannot be made: "
                f"{reason(error)}"
            ) from error

    def descriptor(self) -> int:
        """A new descriptor of this file, which bypasses the page cache if the file system supports that."""
        return os.dup(self._file.fileno())

    @property
    def direct(self) -> bool:
        """Whether reads and writes bypass the page cache."""
        return bool(fcntl.fcntl(self._file, fcntl.F_GETFL) & os.O_DIRECT)

    def copied(self, rows: Tensor, capacity: int, tokens: int) -> CacheFile:
        """A new file with the sequences `rows` of this one, see `gathered`."""
        return self.gathered([self], rows, capacity, tokens)

    @classmethod
    def gathered(cls, files: Sequence[CacheFile], rows: Tensor, capacity: int, tokens: int) -> CacheFile:
        """A new file with the sequences `rows` (int64) of `files`. It has room for `capacity` tokens, and the first
        `tokens` are filled. The files have one shape except for their batch, and sequences count through all files.

        Raises UserError as a new file does, and RunError if a file can't be read or written.
        """
        old = files[0].shape
        new = cls(files[0].folder, CacheShape.fitting(old.layers, len(rows), old.heads, capacity, old.dim, old.dtype))
        new._take(files, rows, tokens)
        return new

    def shrunk(self, rows: Tensor, tokens: int) -> CacheFile:
        """This file with only the sequences `rows`, in this order and no more than before. Every page moves to an
        earlier place, so no room is needed. This object must not be used any more, and after a RunError neither must
        the file.
        """
        new = copy(self)
        new.shape = replace(self.shape, batch=len(rows))
        new._take([self], rows, tokens)
        os.ftruncate(new._file.fileno(), new.shape.layers * new.shape.layer_bytes)
        return new

    def _take(self, files: Sequence[CacheFile], rows: Tensor, tokens: int) -> None:
        """Fills the first tokens of all layers from the sequences of other files."""
        shapes = [file.shape for file in files]
        try:
            for layer in range(self.shape.layers):
                begins, target = [layer * shape.layer_bytes for shape in shapes], layer * self.shape.layer_bytes
                for section, *sources in zip(self.shape.sections, *(shape.sections for shape in shapes), strict=True):
                    self._take_pages(files, begins, target, ceil_div(tokens * section.token_bytes, PAGE), rows)
                    begins = [begin + source.bytes for begin, source in zip(begins, sources, strict=True)]
                    target += section.bytes
        except OSError as error:
            raise RunError(
                f"keys and values of layer {layer} can't be copied in {self.folder}: {error.strerror}; see whether the "
                "disk is whole, then go on"
            ) from error

    def _take_pages(self, files: Sequence[CacheFile], begins: list[int], target: int, pages: int, rows: Tensor) -> None:
        """Copies the first `pages` of every row of a section. It begins at `begins` in the files and at `target` in
        this file.
        """
        wide = self.shape.heads * PAGE  # the n-th pages of one sequence's keys, or of its values
        sizes, new_size = [2 * file.shape.batch * wide for file in files], 2 * len(rows) * wide
        step = max(1, AT_ONCE // sum(sizes))
        for first in range(0, pages, step):
            count, parts = min(step, pages - first), []
            for file, begin, size in zip(files, begins, sizes, strict=True):
                part = reserved(count * size)
                _move(os.preadv, file._file.fileno(), part, begin + first * size)
                parts.append(part.view(2 * count, file.shape.batch, wide))
            whole, taken = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), reserved(count * new_size)
            torch.index_select(whole, 1, rows, out=taken.view(2 * count, len(rows), wide))
            _move(os.pwritev, self._file.fileno(), taken, target + first * new_size)
            for file in (*files, self):
                file._leave_page_cache()

    def _leave_page_cache(self) -> None:
        if not self.direct:
            os.fdatasync(self._file.fileno())
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _move(call: Callable[[int, list[Any], int], int], descriptor: int, memory: Tensor, offset: int) -> None:
    """Fills memory from a file (preadv), or a file from memory (pwritev). Raises OSError if the file ends."""
    rest = memory.numpy()
    while len(rest):
        moved = call(descriptor, [rest], offset)
        if moved == 0:
            raise OSError(errno.EIO, "the file was cut short")
        rest, offset = rest[moved:], offset + moved
