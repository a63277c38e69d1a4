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
import gc
import mmap
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from labkit.kernels.memory import HUGE_PAGE
from labkit.system.rounding import round_up

LEAST_BYTES = 1 << 20  # smaller tensors stay where they are
MOSTLY = 0.9  # share of the weights in new memory from which on they count as placed anew
FREE_SHARE = 0.8  # of the free memory that a second copy may take
MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2  # of linux/mman.h
MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)
SMAPS = Path("/proc/self/smaps")
MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ")
MAP_FAILED = ctypes.c_void_p(-1).value


class PlacedBytes(NamedTuple):
    """Bytes of weights, and how many of them lie in new memory."""

    moved: int
    total: int

    @property
    def anew(self) -> bool:
        """Whether there are weights, and most of them lie in new memory."""
        return self.moved >= MOSTLY * self.total > 0


class _Mapping(NamedTuple):
    """A range of addresses that the system treats alike."""

    begin: int
    end: int
    movable: bool  # private, readable and writable
    huge: bool  # the process has asked for huge pages


class _Span(NamedTuple):
    begin: int
    end: int


def large_tensors() -> list[torch.Tensor]:
    """The tensors of this process whose storage is worth moving. Finding them takes tenths of a second."""
    # isinstance would run code of lazy proxies
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return [tensor for tensor in tensors if _is_large(_storage(tensor))]


def place_anew(tensors: Iterable[torch.Tensor]) -> PlacedBytes:
    """Puts the memory of `tensors` into new memory, with the same kind of pages.

    No thread may write to it meanwhile. Shared and read-only memory stays where it is, as does everything where the
    system is not Linux or its free memory does not hold the largest tensor twice.
    """
    spans = [span for span in _joined(map(_storage, tensors)) if _is_large(span)]
    total = sum(span.end - span.begin for span in spans)
    if not spans or sys.platform != "linux" or not _second_copy_fits(spans):
        return PlacedBytes(0, total)
    mappings = _mappings()
    pieces = [piece for span in spans for piece in _pieces(span, mappings)]
    for begin, end, huge in pieces:
        _move(begin, end - begin, huge)
    return PlacedBytes(sum(end - begin for begin, end, _ in pieces), total)


def copy_files_anew(folder: Path) -> None:
    """Replaces each file below `folder` by a copy, so that processes that open it from now on read other pages of the
    page cache. A link becomes a copy of its file.
    """
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            copy = file.with_name(f"{file.name}.copy")
            shutil.copyfile(file, copy)
            copy.replace(file)


def _storage(tensor: torch.Tensor) -> _Span:
    """The addresses of a tensor's storage; none for tensors without memory of the CPU."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return _Span(0, 0)
    try:
        storage = tensor.untyped_storage()
        return _Span(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    except (RuntimeError, NotImplementedError):  # a wrapper around other tensors
        return _Span(0, 0)


def _is_large(span: _Span) -> bool:
    return span.end - span.begin >= LEAST_BYTES


def _joined(spans: Iterable[_Span]) -> list[_Span]:
    """The same addresses in spans that do not overlap, in ascending order."""
    joined: list[_Span] = []
    for span in sorted(span for span in spans if span.begin):
        if joined and span.begin < joined[-1].end:
            joined[-1] = _Span(joined[-1].begin, max(joined[-1].end, span.end))
        else:
            joined.append(span)
    return joined


def _second_copy_fits(spans: list[_Span]) -> bool:
    largest = max(span.end - span.begin for span in spans)
    return largest + HUGE_PAGE <= FREE_SHARE * psutil.virtual_memory().available


def _mappings() -> list[_Mapping]:
    found: list[_Mapping] = []
    for line in SMAPS.read_text().splitlines():
        if header := MAPPING.match(line):
            begin, end, rights = header.groups()
            found.append(_Mapping(int(begin, 16), int(end, 16), rights.startswith("rw") and rights[3] == "p", False))
        elif line.startswith("VmFlags:"):
            found[-1] = found[-1]._replace(huge="hg" in line.split())
    return found


def _pieces(span: _Span, mappings: list[_Mapping]) -> Iterator[tuple[int, int, bool]]:
    """The whole pages of a span that can be moved, mapping by mapping: begin, end, and whether they are huge."""
    page = mmap.PAGESIZE
    first, last = round_up(span.begin, page), span.end // page * page
    for mapping in mappings:
        begin, end = max(first, mapping.begin), min(last, mapping.end)
        if mapping.movable and begin < end:
            yield begin, end, mapping.huge


def _move(begin: int, size: int, huge: bool) -> None:
    """Copies `size` bytes at `begin` into new memory, which takes their place."""
    library = _library()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    taken = library.mmap(None, size + HUGE_PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if taken == MAP_FAILED:
        raise MemoryError(f"no memory for a second copy of {size / 1e6:.0f} MB")
    copy = taken + (begin - taken) % HUGE_PAGE  # as far into a huge page as the original, so that huge pages move whole
    if huge:
        library.madvise(taken, size + HUGE_PAGE, MADV_HUGEPAGE)
    ctypes.memmove(copy, begin, size)
    moved = library.mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, begin)
    error = ctypes.get_errno()
    if copy > taken:
        library.munmap(taken, copy - taken)
    library.munmap(copy + size, taken + HUGE_PAGE - copy)
    if moved != begin:
        raise OSError(error, os.strerror(error))


@cache
def _library() -> ctypes.CDLL:
    library, address, size = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p, ctypes.c_size_t
    library.mmap.restype = library.mremap.restype = address
    library.mmap.argtypes = [address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    library.mremap.argtypes = [address, size, size, ctypes.c_int, address]
    library.munmap.argtypes = [address, size]
    library.madvise.argtypes = [address, size, ctypes.c_int]
    return library
