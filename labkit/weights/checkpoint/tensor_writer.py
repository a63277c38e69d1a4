"""Writes the safetensors format tensor by tensor, without a second copy of a tensor.

A file begins with a header that tells where all tensors are. The writer leaves room for it and writes it last, padded
with spaces. The format allows no holes between tensors, so the padding that aligns them consists of tensors too, with
names that begin with FILLER.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from xxhash import xxh3_128, xxh64

from labkit.system.rounding import round_up
from labkit.system.whole_file import whole_file

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8", torch.uint8: "U8"}
FILLER = "filler."
LENGTH = 8  # bytes that tell the length of the header
PAGE = 4096  # alignment of blocks and of the first tensor
ALIGNMENT = 64  # default alignment of every tensor
ENTRY = 320  # bytes of the header for a tensor and its filler, at most
PART = 256 << 10  # bytes that are digested and written, or read, at once, so that they stay in a core's own cache


class Extent(NamedTuple):
    """A block of a file: tensors that are read together."""

    offset: int  # a multiple of PAGE
    bytes: int  # a multiple of PAGE
    digest: str  # XXH64, in hex


class TensorWriter:
    """A safetensors file in progress. As a context manager it leaves the file whole or not at all.

    digests: the XXH3 of every added tensor.
    """

    def __init__(self, path: Path, tensors: int, *, alignment: int = ALIGNMENT) -> None:
        """tensors: the most tensors that will be added, for the room of the header. alignment: every tensor begins at a
        multiple of it, in bytes. With 1 there are no fillers, which other readers would take for tensors.
        """
        self._alignment = alignment
        self._path, self._room = path, round_up((tensors + 1) * ENTRY, PAGE)
        self._entries: dict[str, Any] = {}
        self._size = 0  # of all tensors so far
        self._block: tuple[int, xxh64] | None = None
        self._open = ExitStack()
        self.digests: dict[str, str] = {}

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            temporary = opening.enter_context(whole_file(self._path))
            self._file = opening.enter_context(temporary.open("wb"))
            self._open = opening.pop_all()
        self._file.seek(self._room)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor at the next multiple of the alignment."""
        self._fill_to(self._alignment)
        digest = xxh3_128()
        self._write(name, NAMES[tensor.dtype], list(tensor.shape), bytes_of(tensor), digest)
        self.digests[name] = digest.hexdigest()

    def begin_block(self) -> None:
        """Begins a block: the tensors that are added until `end_block` are read together."""
        self._fill_to(PAGE)
        self._block = (self._room + self._size, xxh64())

    def end_block(self) -> Extent:
        self._fill_to(PAGE)
        assert self._block is not None
        (offset, digest), self._block = self._block, None
        return Extent(offset, self._room + self._size - offset, digest.hexdigest())

    def finish(self, metadata: Mapping[str, str]) -> int:
        """Writes the header, and flushes the file to the disk. Returns its size in bytes."""
        text = json.dumps({"__metadata__": dict(metadata), **self._entries}).encode()
        length = self._room - LENGTH
        assert len(text) <= length, f"a header of {len(text)} bytes does not fit into {length}"
        self._file.seek(0)
        self._file.write(length.to_bytes(LENGTH, "little") + text.ljust(length))
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._room + self._size

    def _fill_to(self, multiple: int) -> None:
        if missing := -self._size % multiple:
            self._write(f"{FILLER}{len(self._entries)}", "U8", [missing], memoryview(bytes(missing)))

    def _write(self, name: str, dtype: str, shape: list[int], data: memoryview, digest: xxh3_128 | None = None) -> None:
        begin, self._size = self._size, self._size + len(data)
        self._entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, self._size]}
        for part in parts_of(data):
            if digest is not None:
                digest.update(part)
            if self._block is not None:
                self._block[1].update(part)
            self._file.write(part)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
    """Writes a safetensors file, whole or not at all. Returns its size in bytes."""
    with TensorWriter(path, len(tensors)) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        return writer.finish(metadata)


def parts_of(data: memoryview) -> Iterator[memoryview]:
    return (data[at : at + PART] for at in range(0, len(data), PART))


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, or of a copy for a tensor on a GPU."""
    assert tensor.is_contiguous()
    return tensor.detach().cpu().view(-1).view(torch.uint8).numpy().data
