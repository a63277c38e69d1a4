"""Reads and checks the safetensors format without a second copy of any tensor.

The library's own reader maps the file. Copying from a mapping costs a page fault for every few pages; reading into
memory does not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128

from labkit.system.errors import UserError
from labkit.system.input_file import open_file
from labkit.system.json_file import parse_json
from labkit.weights.checkpoint.pieces import Interval
from labkit.weights.checkpoint.tensor_writer import FILLER, LENGTH, NAMES, PART, bytes_of, parts_of

AGAIN = "copy it again, or save the checkpoint again"
BY_NAME = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Stored:
    """The place of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorStream:
    """A safetensors file. Its tensors are read into the caller's memory, or in slabs of their first two dimensions.

    A whole tensor is compared with its digest before any of its numbers is returned. Raises UserError, naming the
    file, if it is damaged.
    """

    def __init__(self, path: Path, digests: Mapping[str, str]) -> None:
        """digests: the digests of the tensors when the file was written."""
        self.path, self._digests = path, digests
        self._intact: set[str] = set()
        self._file = open_file(path, "a safetensors file").detach()
        size = os.fstat(self._file.fileno()).st_size
        try:
            length = int.from_bytes(self._file.read(LENGTH), "little")
            if length > size:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = parse_json(self._file.read(length), path, "a header of safetensors")
            self.metadata: dict[str, str] = dict(header.pop("__metadata__", {}))
            stored = {name: _stored(entry, LENGTH + length) for name, entry in header.items()}
            _require_gapless(stored, LENGTH + length, size)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({error!r}); {AGAIN}") from error
        self.tensors = {name: entry for name, entry in stored.items() if not name.startswith(FILLER)}

    def read_into(self, name: str, out: Tensor) -> Tensor:
        """Fills `out`, contiguous, with the whole tensor."""
        assert (out.dtype, tuple(out.shape)) == (self.tensors[name].dtype, self.tensors[name].shape)
        self._read(name, parts_of(bytes_of(out)))
        return out

    def whole(self, name: str) -> Tensor:
        """The tensor in memory of its own."""
        stored = self.tensors[name]
        return self.read_into(name, torch.empty(stored.shape, dtype=stored.dtype))

    def check(self, name: str) -> None:
        """Raises UserError unless the tensor still has its digest."""
        if name in self._intact:
            return
        buffer, size = memoryview(bytearray(PART)), self.tensors[name].nbytes
        self._read(name, (buffer[: size - at] for at in range(0, size, PART)))

    def slab(self, name: str, outer: Interval, inner: Interval | None = None) -> Tensor:
        """[begin, end) of the first dimension, and of the second if given, in memory of its own."""
        stored = self.tensors[name]
        self.check(name)
        first, last = inner or (0, stored.shape[1])
        out = torch.empty((outer[1] - outer[0], last - first, *stored.shape[2:]), dtype=stored.dtype)
        data = bytes_of(out)
        entry = math.prod(stored.shape[2:]) * stored.dtype.itemsize
        row, run = stored.shape[1] * entry, (last - first) * entry
        if run == row:
            self._fill(name, data, outer[0] * row)
            return out
        for index in range(len(out)):
            self._fill(name, data[index * run : (index + 1) * run], (outer[0] + index) * row + first * entry)
        return out

    def _read(self, name: str, parts: Iterable[memoryview]) -> None:
        """Reads a tensor into these parts, one after the other, and compares it with its digest."""
        digest, at = xxh3_128(), 0
        for part in parts:
            self._fill(name, part, at)
            digest.update(part)
            at += len(part)
        if (actual := digest.hexdigest()) != (expected := self._digests.get(name)):
            raise UserError(f"{self.path} was altered: the digest of {name} is {actual}, expected {expected}; {AGAIN}")
        self._intact.add(name)

    def _fill(self, name: str, data: memoryview, skipped: int) -> None:
        done, offset = 0, self.tensors[name].offset + skipped
        while done < len(data):
            read = os.preadv(self._file.fileno(), [data[done:]], offset + done)
            if read == 0:
                raise UserError(f"{self.path} ends within {name}; {AGAIN}")
            done += read


def _stored(entry: Mapping[str, Any], start: int) -> Stored:
    """The header's entry of a tensor, in a file whose tensors begin at `start`."""
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, begin)):
        raise UserError(f"a tensor of shape {list(shape)} at {begin}")
    stored = Stored(BY_NAME[entry["dtype"]], shape, start + begin)
    if begin + stored.nbytes != end:
        raise UserError(f"a tensor of {stored.nbytes} bytes from {begin} to {end}")
    return stored


def _require_gapless(stored: Mapping[str, Stored], start: int, size: int) -> None:
    """Raises UserError unless the tensors fill the file from `start` to its end, as the format requires."""
    end = start
    for name, entry in sorted(stored.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise UserError(f"{name} begins at {entry.offset}, expected {end}")
        end += entry.nbytes
    if end != size:
        raise UserError(f"tensors that end at {end} of {size} bytes")
