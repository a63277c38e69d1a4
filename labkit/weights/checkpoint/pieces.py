"""Finds the parts of a tensor that is divided among several holders. Merging and splitting both build on this."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.models.shards import Cut
from labkit.system.errors import UserError

Interval = tuple[int, int]  # [begin, end)


@dataclass(frozen=True)
class HeldRange:
    """The range [begin, end) of the numbers of `holder`; it goes to position `at` of the result."""

    holder: int
    begin: int
    end: int
    at: int


def pieces(targets: Sequence[Interval], holdings: Sequence[Sequence[Interval]]) -> list[HeldRange]:
    """The pieces that make up the ranges `targets` of a whole. Holder h has the ranges `holdings[h]` of the whole, one
    after the other.

    The result has the order of `targets`. A range that several holders have comes from the first of them. Raises
    UserError for a range that no holder has.
    """
    sources = list(_located(holdings))
    parts, at = [], 0
    for begin, end in targets:
        while begin < end:
            source = next((source for source in sources if source.begin <= begin < source.end), None)
            if source is None:
                raise UserError(f"no holder has {begin} to {end}")
            stop = min(end, source.end)
            local = source.at + begin - source.begin
            parts.append(HeldRange(source.holder, local, local + stop - begin, at))
            at += stop - begin
            begin = stop
    return parts


def _located(holdings: Sequence[Sequence[Interval]]) -> Iterator[HeldRange]:
    """All ranges of all holders. `begin` and `end` are positions in the whole, `at` is the position at the holder."""
    for holder, ranges in enumerate(holdings):
        at = 0
        for begin, end in ranges:
            yield HeldRange(holder, begin, end, at)
            at += end - begin


def ranges_of(cut: Cut | None, whole: int) -> tuple[Interval, ...]:
    """The ranges that a cut takes of a dimension of size `whole`: all of it without a cut."""
    return ((0, whole),) if cut is None else cut.ranges


@dataclass(frozen=True)
class FilePart:
    """The part of a tensor in one file: `ranges` of the divided dimension. `read` returns that part."""

    read: Callable[[], Tensor]
    ranges: tuple[Interval, ...]


@dataclass(frozen=True)
class Divided:
    """A tensor of `shape` that is divided among several files along `dim`."""

    shape: tuple[int, ...]
    dim: int
    parts: tuple[FilePart, ...]

    def get(self, cut: Cut | None = None) -> Tensor:
        """The tensor, or the cut's part of it. It is a view if it comes from one file.

        Raises UserError for a cut of another shape.
        """
        if cut is not None and (len(self.shape) <= cut.dim or cut.whole != self.shape[cut.dim]):
            raise UserError(f"has shape {list(self.shape)}, expected {cut.whole} in dimension {cut.dim}")
        along = cut if cut is not None and cut.dim == self.dim else None
        sources = pieces(ranges_of(along, self.shape[self.dim]), [part.ranges for part in self.parts])
        read = {holder: self.parts[holder].read() for holder in dict.fromkeys(piece.holder for piece in sources)}
        taken = [read[piece.holder].narrow(self.dim, piece.begin, piece.end - piece.begin) for piece in sources]
        if cut is not None and along is None:
            taken = [cut(tensor) for tensor in taken]
        return taken[0] if len(taken) == 1 else torch.cat(taken, self.dim)
