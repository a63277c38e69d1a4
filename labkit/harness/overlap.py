"""Overlap of reading layers and computing layers, from spans in any unit of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Interval = tuple[float, float]  # (begin, end)


class Overlap(NamedTuple):
    """How long layers were read and computed."""

    read: float
    compute: float
    busy: float  # at least one of the two

    @classmethod
    def within(cls, begin: float, end: float, reads: Sequence[Interval], computed: Sequence[Interval]) -> Overlap:
        """Counts the spans between two times; a longer span counts with its part between them."""
        clipped = [[(max(first, begin), min(last, end)) for first, last in spans] for spans in (reads, computed)]
        read, compute = ([span for span in spans if span[1] > span[0]] for spans in clipped)
        return cls(_covered(read), _covered(compute), _covered([*read, *compute]))

    @property
    def hidden(self) -> float | None:
        """The part of the shorter activity (reading or computing) that coincided with the other, 0 to 1. None: nothing
        was read, or nothing computed.
        """
        shorter = min(self.read, self.compute)
        if shorter <= 0:
            return None
        return min(1.0, max(0.0, (self.read + self.compute - self.busy) / shorter))  # rounding may pass 0 or 1


def _covered(intervals: Sequence[Interval]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total
