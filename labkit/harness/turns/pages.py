"""Memory of this process that holds tensors: its addresses, how the system maps them, and calls that map them anew."""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
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
FREE_SHARE = 0.8  # of the free memory that a second copy may take
MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
SMAPS = Path("/proc/self/smaps")
MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ")
MAP_FAILED = ctypes.c_void_p(-1).value


class AddressRange(NamedTuple):
    """A range of addresses."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin


class Mapping(NamedTuple):
    """A range of addresses that the system treats alike."""

    begin: int
    end: int
    movable: bool  # private, readable and writable
    huge: bool  # the process has asked for huge pages


class Piece(NamedTuple):
    """Whole pages that can be replaced by other memory."""

    begin: int
    end: int
    huge: bool  # the process has asked for huge pages

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin


def large_tensors() -> list[torch.Tensor]:
    """The tensors of this process whose storage is worth moving. Finding them takes tenths of a second."""
    # isinstance would run code of lazy proxies
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return [tensor for tensor in tensors if _is_large(_storage(tensor))]


def large_spans(tensors: Iterable[torch.Tensor]) -> list[AddressRange]:
    """The memory of these tensors in spans that do not overlap, in ascending order, without small ones."""
    return [span for span in _joined(map(_storage, tensors)) if _is_large(span)]


def pieces_of(spans: Iterable[AddressRange], but: Iterable[AddressRange] = ()) -> list[Piece]:
    """The whole pages of these spans that can be moved, mapping by mapping, outside of the spans `but`. No page on a
    system other than Linux.
    """
    if sys.platform != "linux":
        return []
    mappings, left_out = _mappings(), sorted(but)
    return [piece for span in spans for part in _without(span, left_out) for piece in _pieces(part, mappings)]


def fits(size: int) -> bool:
    """Whether a second copy of `size` bytes fits into the free memory."""
    return size + HUGE_PAGE <= FREE_SHARE * psutil.virtual_memory().available


def _storage(tensor: torch.Tensor) -> AddressRange:
    """The addresses of a tensor's storage; none for tensors without memory of the CPU."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return AddressRange(0, 0)
    try:
        storage = tensor.untyped_storage()
        return AddressRange(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    except (RuntimeError, NotImplementedError):  # a wrapper around other tensors
        return AddressRange(0, 0)


def _is_large(span: AddressRange) -> bool:
    return span.size >= LEAST_BYTES


def _joined(spans: Iterable[AddressRange]) -> list[AddressRange]:
    """The same addresses in spans that do not overlap, in ascending order."""
    joined: list[AddressRange] = []
    for span in sorted(span for span in spans if span.begin):
        if joined and span.begin < joined[-1].end:
            joined[-1] = AddressRange(joined[-1].begin, max(joined[-1].end, span.end))
        else:
            joined.append(span)
    return joined


def _without(span: AddressRange, left_out: list[AddressRange]) -> Iterator[AddressRange]:
    """The parts of a span outside of other spans, which are sorted."""
    begin = span.begin
    for other in left_out:
        if begin < other.begin < span.end:
            yield AddressRange(begin, other.begin)
        if other.begin < span.end:
            begin = max(begin, other.end)
    if begin < span.end:
        yield AddressRange(begin, span.end)


def _mappings() -> list[Mapping]:
    mappings: list[Mapping] = []
    for line in SMAPS.read_text().splitlines():
        if header := MAPPING.match(line):
            begin, end, rights = header.groups()
            mappings.append(Mapping(int(begin, 16), int(end, 16), rights.startswith("rw") and rights[3] == "p", False))
        elif line.startswith("VmFlags:"):
            mappings[-1] = mappings[-1]._replace(huge="hg" in line.split())
    return mappings


def _pieces(span: AddressRange, mappings: list[Mapping]) -> Iterator[Piece]:
    """The whole pages of a span that can be moved, mapping by mapping."""
    page = mmap.PAGESIZE
    first, last = round_up(span.begin, page), span.end // page * page
    for mapping in mappings:
        begin, end = max(first, mapping.begin), min(last, mapping.end)
        if mapping.movable and begin < end:
            yield Piece(begin, end, mapping.huge)


@cache
def library() -> ctypes.CDLL:
    """The C library, with the types of its calls that map memory."""
    calls, address, size = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p, ctypes.c_size_t
    calls.mmap.restype = calls.mremap.restype = address
    calls.mmap.argtypes = [address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    calls.mremap.argtypes = [address, size, size, ctypes.c_int, address]
    calls.munmap.argtypes = [address, size]
    calls.madvise.argtypes = [address, size, ctypes.c_int]
    calls.memcmp.argtypes = [address, address, size]
    return calls
