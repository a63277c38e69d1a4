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

import numpy as np
import torch

from labkit.harness.runs import MOSTLY
from labkit.harness.turns.pages import (
    MADV_HUGEPAGE,
    MAP_FAILED,
    READ_WRITE,
    AddressRange,
    Piece,
    fits,
    large_spans,
    library,
    pieces_of,
)
from labkit.kernels.memory import HUGE_PAGE
from labkit.kernels.probe import probe_memory

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
    system is not Linux or its free memory does not hold the largest tensor twice. If the free memory does not hold all
    of them twice, a tensor may get the memory that another one had.
    """
    spans = large_spans(tensors)
    total = sum(span.size for span in spans)
    pieces = pieces_of(spans, but)
    size = sum(piece.size for piece in pieces)
    if not pieces or not fits(max(piece.size for piece in pieces)):
        return PlacedBytes(0, total)
    for together in [pieces] if fits(size) else [[piece] for piece in pieces]:
        _move(together)
    return PlacedBytes(size, total)


def place_probe_anew() -> None:
    """Puts the memory that this process's probes of the read bandwidth read into new memory."""
    place_anew(probe_memory())


def copy_files_anew(folder: Path) -> None:
    """Replaces each file below `folder` by a copy, so that processes that open it from now on read other pages of the
    page cache. A link becomes a copy of its file.
    """
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            copy = file.with_name(f"{file.name}.copy")
            shutil.copyfile(file, copy)
            copy.replace(file)


def _move(pieces: list[Piece]) -> None:
    """Copies pieces into new memory, which takes their places once all are copied: memory that becomes free earlier
    would be the new memory of the next piece.
    """
    calls = library()
    copies: list[tuple[Piece, int]] = []
    try:
        for piece in pieces:
            copies.append((piece, _copied(piece)))
        while copies:
            piece, copy = copies[-1]
            if calls.mremap(copy, piece.size, piece.size, MREMAP_MAYMOVE | MREMAP_FIXED, piece.begin) != piece.begin:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))
            copies.pop()
    finally:
        for piece, copy in copies:
            calls.munmap(copy, piece.size)


def _copied(piece: Piece) -> int:
    """The address of a copy in new memory, as far into a huge page as the original, so that huge pages move whole."""
    calls, room = library(), piece.size + HUGE_PAGE
    taken = calls.mmap(None, room, READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if taken == MAP_FAILED:
        raise MemoryError(f"no memory for a second copy of {piece.size / 1e6:.0f} MB")
    copy: int = taken + (piece.begin - taken) % HUGE_PAGE
    if piece.huge:
        calls.madvise(taken, room, MADV_HUGEPAGE)
    _copy_filled(piece, copy)
    if copy > taken:
        calls.munmap(taken, copy - taken)
    calls.munmap(copy + piece.size, taken + HUGE_PAGE - copy)
    return copy


def _copy_filled(piece: Piece, copy: int) -> None:
    """Copies a piece to memory that the system has just given, which holds zeros. Parts of zeros are left out, so that
    address space that was reserved and never filled takes no memory in the copy either.
    """
    for begin in range(0, piece.size, HUGE_PAGE):
        size = min(HUGE_PAGE, piece.size - begin)
        part = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(piece.begin + begin))
        if part.any():
            ctypes.memmove(copy + begin, piece.begin + begin, size)
