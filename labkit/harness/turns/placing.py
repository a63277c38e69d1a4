"""Weights in new memory at their old addresses.

A decode step takes 1 to 3 % more or less time according to which pages of the machine's memory hold the weights, and a
process keeps its pages for its whole life. So two processes with the same engine differ, and no number of runs of these
two shows it. With weights in new memory from time to time, the difference becomes noise that averages out (Curtsinger
and Berger, Stabilizer, ASPLOS 2013).

The pages of a tensor are copied into new memory, which then takes the place of the old one (mremap). No pointer
changes, so this works for the engine, for transformers and for every library that computes with torch's tensors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from labkit.harness.runs import MOSTLY
from labkit.harness.turns.pages import (
    MADV_HUGEPAGE,
    MAP_FAILED,
    READ_WRITE,
    AddressRange,
    fits,
    large_spans,
    library,
    pieces_of,
)
from labkit.kernels.memory import HUGE_PAGE

MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2  # of linux/mman.h


class PlacedBytes(NamedTuple):
    """Bytes of weights, and how many of them lie in new memory."""

    moved: int
    total: int

    @property
    def anew(self) -> bool:
        """Whether there are weights, and most of them lie in new memory."""
        return self.moved >= MOSTLY * self.total > 0


def place_anew(tensors: Iterable[torch.Tensor], *, but: Iterable[AddressRange] = ()) -> PlacedBytes:
    """Puts the memory of `tensors`, without the addresses in `but`, into new memory with the same kind of pages.

    No thread may write to it meanwhile. Shared and read-only memory stays where it is, as does everything where the
    system is not Linux or its free memory does not hold the largest tensor twice.
    """
    spans = large_spans(tensors)
    total = sum(span.size for span in spans)
    pieces = pieces_of(spans, but)
    if not pieces or not fits(max(piece.size for piece in pieces)):
        return PlacedBytes(0, total)
    for piece in pieces:
        _move(piece.begin, piece.size, piece.huge)
    return PlacedBytes(sum(piece.size for piece in pieces), total)


def copy_files_anew(folder: Path) -> None:
    """Replaces each file below `folder` by a copy, so that processes that open it from now on read other pages of the
    page cache. A link becomes a copy of its file.
    """
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            copy = file.with_name(f"{file.name}.copy")
            shutil.copyfile(file, copy)
            copy.replace(file)


def _move(begin: int, size: int, huge: bool) -> None:
    """Copies `size` bytes at `begin` into new memory, which takes their place."""
    calls = library()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    taken = calls.mmap(None, size + HUGE_PAGE, READ_WRITE, flags, -1, 0)
    if taken == MAP_FAILED:
        raise MemoryError(f"no memory for a second copy of {size / 1e6:.0f} MB")
    copy = taken + (begin - taken) % HUGE_PAGE  # as far into a huge page as the original, so that huge pages move whole
    if huge:
        calls.madvise(taken, size + HUGE_PAGE, MADV_HUGEPAGE)
    ctypes.memmove(copy, begin, size)
    moved = calls.mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, begin)
    error = ctypes.get_errno()
    if copy > taken:
        calls.munmap(taken, copy - taken)
    calls.munmap(copy + size, taken + HUGE_PAGE - copy)
    if moved != begin:
        raise OSError(error, os.strerror(error))
