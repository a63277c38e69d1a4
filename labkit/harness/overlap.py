"""Overlap of reading layers and computing layers, from spans in any unit of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

Interval = tuple[float, float]  # (begin, end)
Span = tuple[str, float, float]  # (kind, begin, end)


class Overlap(NamedTuple):
    """How long layers were read and computed."""

    read: float
    compute: float
    busy: float  # at least one of the two

    @classmethod
    def within(cls, begin: float, end: float, spans: Iterable[Span]) -> Overlap:
        """Counts reading and computing between two times; a longer span counts with its part between them. Spans of
        other kinds do not count.
        """
        clipped = [(kind, max(first, begin), min(last, end)) for kind, first, last in spans]
        read, compute = (
            [(first, last) for kind, first, last in clipped if kind == counted and first < last]
            for counted in ("read", "compute")
        )
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
