"""Weights that two processes read from the same pages of memory, so that their place favours neither of them.

Two versions of one engine usually pack the same weights into the same bytes. One process publishes its bytes in a file
without a name (memfd) and maps that file over its own addresses. The other process maps it over its addresses, too,
where it has the same bytes. No pointer changes. A new file in each epoch means new memory for both.

Both mappings copy on write: both processes read the same pages, and a process that writes gets its own copy of that
page, which the other process does not see.

Huge pages stay huge: they are collapsed (MADV_COLLAPSE) even where the system gives none to shared memory by itself, so
a step takes about as long as with weights in memory of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from xxhash import xxh3_128_hexdigest

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
from labkit.system.rounding import round_up

MADV_NOHUGEPAGE, MADV_POPULATE_READ, MADV_COLLAPSE = 15, 22, 25  # of linux/mman.h
PROT_NONE, MAP_FIXED = 0, 0x10
RUN_BYTES = 128 * HUGE_PAGE  # copied at once, so that a second copy of all weights is never needed


class WeightBlock(NamedTuple):
    """Part of the weights, as the other process needs to know it."""

    digest: str
    size: int  # bytes, HUGE_PAGE at most
    offset: int  # of its address in a huge page
    huge: bool  # whether the process has asked for huge pages


class SharedBlock(NamedTuple):
    """A block that both processes have."""

    number: int  # among the blocks of this process
    huge: bool  # whether both can have it in a huge page
    position: int = 0  # in the file


class _Run(NamedTuple):
    """Neighbouring blocks."""

    begin: int
    size: int
    position: int  # in the file
    huge: bool


def matching(ours: Sequence[WeightBlock], theirs: Sequence[WeightBlock]) -> list[tuple[SharedBlock, SharedBlock]]:
    """The blocks of two processes that have the same bytes, at addresses that allow the same pages."""
    known: dict[tuple[str, int, int], list[int]] = {}
    for index, block in enumerate(ours):
        known.setdefault(_kind(block), []).append(index)
    pairs = []
    for index, block in enumerate(theirs):
        if indices := known.get(_kind(block)):
            first = indices.pop(0)
            huge = block.huge and ours[first].huge and block.offset == ours[first].offset
            pairs.append((SharedBlock(first, huge), SharedBlock(index, huge)))
    return sorted(pairs)


def _kind(block: WeightBlock) -> tuple[str, int, int]:
    return block.digest, block.size, block.offset % mmap.PAGESIZE


class SharedPages:
    """The weights of this process in blocks, of which another process may have the same."""

    def __init__(self, tensors: Iterable[torch.Tensor], step: Callable[[], object]) -> None:
        """`step`: generates something new. Memory that it writes to, such as a cache of keys and values, and memory
        that nothing has filled are left out.
        """
        self._tensors = list(tensors)
        spans = large_spans(self._tensors)
        pieces = pieces_of(spans)
        parts_of = [list(_parts(piece for piece in pieces if span.begin <= piece.begin < span.end)) for span in spans]
        before = [[_digest(part) for part in parts] for parts in parts_of]
        step()
        self.blocks: list[WeightBlock] = []
        self._parts: list[Piece] = []  # the addresses of each block
        self._shared: list[AddressRange] = []
        self._file: int | None = None
        empty: dict[int, str] = {}  # digest of zeros, by size
        for parts, digests in zip(parts_of, before, strict=True):
            if digests != [_digest(part) for part in parts]:
                continue
            for part, digest in zip(parts, digests, strict=True):
                if part.size not in empty:
                    empty[part.size] = xxh3_128_hexdigest(bytes(part.size))
                if digest != empty[part.size]:
                    self.blocks.append(WeightBlock(digest, part.size, part.begin % HUGE_PAGE, part.huge))
                    self._parts.append(part)

    @property
    def shared(self) -> list[AddressRange]:
        """Addresses that this process shares by now."""
        return self._shared

    def publish(self, blocks: Sequence[SharedBlock]) -> dict[str, Any]:
        """Puts blocks into a new file and maps it over their addresses. Returns this process, the descriptor of its
        file, and the position of each block. The file stays open until the next one.

        MemoryError where the free memory does not hold the blocks. OSError where the system refuses.
        """
        self._check_addresses()
        if not fits(needed := sum(self._parts[block.number].size for block in blocks)):
            raise MemoryError(f"the free memory does not hold another {needed / 1e6:.0f} MB of weights")
        blocks, size = self._positions(blocks)
        if self._file is not None:
            os.close(self._file)
        self._file = os.memfd_create("labkit-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._file, size)
        for run in self._runs(blocks):
            with _mapped(self._file, run, READ_WRITE) as copy:
                library().madvise(copy, run.size, MADV_HUGEPAGE if run.huge else MADV_NOHUGEPAGE)
                ctypes.memmove(copy, run.begin, run.size)
                if run.huge:
                    library().madvise(copy, run.size, MADV_COLLAPSE)
            _replace(self._file, run)
        self._shared = [self._span(block) for block in blocks]
        return {"pid": os.getpid(), "file": self._file, "positions": [block.position for block in blocks]}

    def adopt(self, pid: int, file: int, blocks: Sequence[SharedBlock]) -> list[bool]:
        """Maps the file that the process `pid` has published over those blocks that have the same bytes there. Returns
        which ones do. OSError where the system refuses.
        """
        self._check_addresses()
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            equal = [self._equals(opened, block) for block in blocks]
            same = [block for block, is_equal in zip(blocks, equal, strict=True) if is_equal]
            for run in self._runs(same):
                _replace(opened, run)
            self._shared = [self._span(block) for block in same]
        finally:
            os.close(opened)
        return equal

    def _check_addresses(self) -> None:
        """OSError where a tensor has moved since the blocks were found."""
        present = pieces_of(large_spans(self._tensors))
        begins = [piece.begin for piece in present]
        for part in self._parts:
            index = bisect_right(begins, part.begin) - 1
            if index < 0 or part.end > present[index].end:
                raise OSError("a library has put its tensors elsewhere")

    def _span(self, block: SharedBlock) -> AddressRange:
        part = self._parts[block.number]
        return AddressRange(part.begin, part.end)

    def _positions(self, blocks: Sequence[SharedBlock]) -> tuple[list[SharedBlock], int]:
        """The blocks with their positions in a file, and its size. A huge page begins at a multiple of its size."""
        positioned, end = [], 0
        for block in blocks:
            part = self._parts[block.number]
            if block.huge:
                end += (part.begin - end) % HUGE_PAGE
            positioned.append(block._replace(position=end))
            end += part.size
        return positioned, round_up(end, HUGE_PAGE)

    def _runs(self, blocks: Sequence[SharedBlock]) -> Iterator[_Run]:
        """Neighbouring blocks together."""
        run: _Run | None = None
        for block in blocks:
            part = self._parts[block.number]
            if run is not None:
                following = run.begin + run.size, run.position + run.size, run.huge
                if (part.begin, block.position, block.huge) == following and run.size + part.size <= RUN_BYTES:
                    run = run._replace(size=run.size + part.size)
                    continue
                yield run
            run = _Run(part.begin, part.size, block.position, block.huge)
        if run is not None:
            yield run

    def _equals(self, file: int, block: SharedBlock) -> bool:
        part = self._parts[block.number]
        with _mapped(file, _Run(part.begin, part.size, block.position, block.huge), mmap.PROT_READ) as theirs:
            return library().memcmp(theirs, part.begin, part.size) == 0


def _parts(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Parts of HUGE_PAGE bytes at most. Memory with huge pages is cut between them. Other memory is cut from its
    beginning on, since its addresses differ from process to process.
    """
    for begin, end, huge in pieces:
        while begin < end:
            following = min(end, begin + HUGE_PAGE - (begin % HUGE_PAGE if huge else 0))
            yield Piece(begin, following, huge)
            begin = following


def _digest(part: Piece) -> str:
    return xxh3_128_hexdigest((ctypes.c_char * part.size).from_address(part.begin))


@contextmanager
def _mapped(file: int, run: _Run, rights: int) -> Iterator[int]:
    """The address of a run of the file, which is as far into a huge page as the run's own address."""
    calls, room = library(), run.size + HUGE_PAGE
    taken = calls.mmap(None, room, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if taken == MAP_FAILED:
        raise MemoryError(f"no addresses for {run.size / 1e6:.0f} MB of shared weights")
    try:
        address = taken + (run.begin - taken) % HUGE_PAGE
        _map(address, run, rights, mmap.MAP_SHARED, file)
        yield address
    finally:
        calls.munmap(taken, room)


def _replace(file: int, run: _Run) -> None:
    """Maps a run of the file over its addresses. Pages are present at once, so that no step waits for them."""
    _map(run.begin, run, READ_WRITE, mmap.MAP_PRIVATE, file)
    library().madvise(run.begin, run.size, MADV_HUGEPAGE if run.huge else MADV_NOHUGEPAGE)
    library().madvise(run.begin, run.size, MADV_POPULATE_READ)


def _map(address: int, run: _Run, rights: int, kind: int, file: int) -> None:
    if library().mmap(address, run.size, rights, kind | MAP_FIXED, file, run.position) == MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
