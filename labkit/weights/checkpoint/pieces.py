"""Where the parts of a tensor are that several holders have between them: what merging and splitting come down to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.models.shards import Cut
from labkit.system.errors import UserError

Range = tuple[int, int]  # [begin, end)


@dataclass(frozen=True)
class HeldRange:
    """[begin, end) of what `holder` has, which goes to `at` of what is wanted."""

    holder: int
    begin: int
    end: int
    at: int


def pieces(wanted: Sequence[Range], held: Sequence[Sequence[Range]]) -> list[HeldRange]:
    """Where the wanted ranges of a whole are, in their order, when holder h has the ranges `held[h]` of it in theirs.

    What several holders have is taken from the first. Raises ValueError for a part that nobody has.
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


def _located(held: Sequence[Sequence[Range]]) -> Iterator[HeldRange]:
    """As pieces of the whole: `at` is where the range stands at its holder."""
    for holder, ranges in enumerate(held):
        at = 0
        for begin, end in ranges:
            yield HeldRange(holder, begin, end, at)
            at += end - begin


def ranges_of(cut: Cut | None, whole: int) -> tuple[Range, ...]:
    """What a cut takes of a dimension of `whole`: all of it without one."""
    return ((0, whole),) if cut is None else cut.ranges


@dataclass(frozen=True)
class FilePart:
    """What one file holds of a tensor: these ranges of its divided dimension. `read` gives it, mapped where it can."""

    read: Callable[[], Tensor]
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Divided:
    """A tensor of `shape` that several files hold between them, divided along `dim`."""

    shape: tuple[int, ...]
    dim: int
    parts: tuple[FilePart, ...]

    def get(self, cut: Cut | None = None) -> Tensor:
        """The tensor, or the part that the cut takes, from the files that have it: a view where one file has it all.

        Raises ValueError for a cut of another shape.
        """
        if cut is not None and cut.whole != self.shape[cut.dim]:
            raise UserError(f"has {self.shape[cut.dim]} in dimension {cut.dim}, expected {cut.whole}")
        along = cut if cut is not None and cut.dim == self.dim else None
        wanted = pieces(ranges_of(along, self.shape[self.dim]), [part.ranges for part in self.parts])
        read = {holder: self.parts[holder].read() for holder in dict.fromkeys(piece.holder for piece in wanted)}
        taken = [read[piece.holder].narrow(self.dim, piece.begin, piece.end - piece.begin) for piece in wanted]
        if cut is not None and along is None:
            taken = [cut(tensor) for tensor in taken]
        return taken[0] if len(taken) == 1 else torch.cat(taken, self.dim)
