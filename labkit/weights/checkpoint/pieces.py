"""Where the parts of a tensor are that is divided among several holders. Merging and splitting both build on this."""

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
    """The range [begin, end) of what `holder` has; it goes to position `at` of what is wanted."""

    holder: int
    begin: int
    end: int
    at: int


def pieces(wanted: Sequence[Interval], held: Sequence[Sequence[Interval]]) -> list[HeldRange]:
    """Where the wanted ranges of a whole are, when holder h has the ranges `held[h]` of it one behind the other.

    The result has the order of the wanted ranges. What several holders have is taken from the first of them. Raises
    UserError for a part that no holder has.
    """
    known = list(_located(held))
    found, at = [], 0
    for begin, end in wanted:
        while begin < end:
            there = next((one for one in known if one.begin <= begin < one.end), None)
            if there is None:
                raise UserError(f"nobody holds {begin} to {end}")
            stop = min(end, there.end)
            local = there.at + begin - there.begin
            found.append(HeldRange(there.holder, local, local + stop - begin, at))
            at += stop - begin
            begin = stop
    return found


def _located(held: Sequence[Sequence[Interval]]) -> Iterator[HeldRange]:
    """All ranges that are held. Here `begin` and `end` count in the whole, and `at` is the position at the holder."""
    for holder, ranges in enumerate(held):
        at = 0
        for begin, end in ranges:
            yield HeldRange(holder, begin, end, at)
            at += end - begin


def ranges_of(cut: Cut | None, whole: int) -> tuple[Interval, ...]:
    """The ranges that a cut takes of a dimension of size `whole`; without a cut that is all of it."""
    return ((0, whole),) if cut is None else cut.ranges


@dataclass(frozen=True)
class FilePart:
    """The part of a tensor that one file holds: these ranges of the divided dimension. `read` gives that part."""

    read: Callable[[], Tensor]
    ranges: tuple[Interval, ...]


@dataclass(frozen=True)
class Divided:
    """A tensor of `shape` that several files hold between them, divided along `dim`."""

    shape: tuple[int, ...]
    dim: int
    parts: tuple[FilePart, ...]

    def get(self, cut: Cut | None = None) -> Tensor:
        """The tensor, or the part that the cut takes, from the files that have it. It is a view where one file has it.

        Raises UserError for a cut of another shape.
        """
        if cut is not None and (len(self.shape) <= cut.dim or cut.whole != self.shape[cut.dim]):
            raise UserError(f"has shape {list(self.shape)}, expected {cut.whole} in dimension {cut.dim}")
        along = cut if cut is not None and cut.dim == self.dim else None
        wanted = pieces(ranges_of(along, self.shape[self.dim]), [part.ranges for part in self.parts])
        read = {holder: self.parts[holder].read() for holder in dict.fromkeys(piece.holder for piece in wanted)}
        taken = [read[piece.holder].narrow(self.dim, piece.begin, piece.end - piece.begin) for piece in wanted]
        if cut is not None and along is None:
            taken = [cut(tensor) for tensor in taken]
        return taken[0] if len(taken) == 1 else torch.cat(taken, self.dim)
