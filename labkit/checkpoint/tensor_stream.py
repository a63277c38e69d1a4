"""The safetensors format, written and read without a second copy of any tensor.

The library's own writer holds all tensors twice, and its reader maps the file: filling memory that is there already
from a mapping costs a page fault for every few pages, which reading does not.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit.checkpoint.pieces import Range
from labkit.whole_file import whole_file

NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
LENGTH = 8  # bytes that tell the length of the header
AT_ONCE = 16 << 20


@dataclass(frozen=True)
class Stored:
    """Where a tensor stands in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[int, str]:
    """Writes a safetensors file, whole or not at all: (its bytes, its BLAKE2b digest)."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 64 - LENGTH)  # so that tensors are aligned in a mapping of the file
    digest = blake2b(digest_size=32)
    with whole_file(path) as temporary, temporary.open("wb") as file:
        for data in (memoryview(len(text).to_bytes(LENGTH, "little") + text), *map(_bytes_of, tensors.values())):
            for at in range(0, len(data), AT_ONCE):
                digest.update(data[at : at + AT_ONCE])
                file.write(data[at : at + AT_ONCE])
        file.flush()
        os.fsync(file.fileno())
    return LENGTH + len(text) + end, digest.hexdigest()


def digest_of(path: Path) -> str:
    """The BLAKE2b digest of a file."""
    digest = blake2b(digest_size=32)
    with path.open("rb") as file:
        while data := file.read(AT_ONCE):
            digest.update(data)
    return digest.hexdigest()


class TensorStream:
    """A safetensors file to read tensors of into memory that is there, whole or some of their first dimension."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a file whose header can't be read."""
        self.path = path
        self._file = path.open("rb", buffering=0)
        try:
            length = int.from_bytes(self._file.read(LENGTH), "little")
            if length > os.fstat(self._file.fileno()).st_size:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(self._file.read(length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.tensors = {
                name: Stored(
                    DTYPES[entry["dtype"]], tuple(entry["shape"]), LENGTH + length + int(entry["data_offsets"][0])
                )
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}); copy it again, or save the checkpoint again") from error

    def read_into(self, name: str, out: Tensor) -> Tensor:
        """Fills `out`, contiguous, with the whole tensor. Raises ValueError for a file that ends within it."""
        assert (out.dtype, tuple(out.shape)) == (self.tensors[name].dtype, self.tensors[name].shape)
        self._fill(name, _bytes_of(out), 0)
        return out

    def whole(self, name: str) -> Tensor:
        """The tensor in memory of its own."""
        stored = self.tensors[name]
        return self.read_into(name, torch.empty(stored.shape, dtype=stored.dtype))

    def slab(self, name: str, outer: Range, inner: Range | None = None) -> Tensor:
        """[begin, end) of the first dimension, and of the second if given, in memory of its own."""
        stored = self.tensors[name]
        first, last = inner or (0, stored.shape[1])
        out = torch.empty((outer[1] - outer[0], last - first, *stored.shape[2:]), dtype=stored.dtype)
        data = _bytes_of(out)
        entry = math.prod(stored.shape[2:]) * stored.dtype.itemsize
        row, run = stored.shape[1] * entry, (last - first) * entry
        if run == row:
            self._fill(name, data, outer[0] * row)
            return out
        for index in range(len(out)):
            self._fill(name, data[index * run : (index + 1) * run], (outer[0] + index) * row + first * entry)
        return out

    def _fill(self, name: str, data: memoryview, skipped: int) -> None:
        done, offset = 0, self.tensors[name].offset + skipped
        while done < len(data):
            read = os.preadv(self._file.fileno(), [data[done:]], offset + done)
            if read == 0:
                raise ValueError(f"{self.path} ends within {name}; copy it again, or save the checkpoint again")
            done += read


def _bytes_of(tensor: Tensor) -> memoryview:
    assert tensor.is_contiguous()
    return tensor.detach().cpu().view(-1).view(torch.uint8).numpy().data
