"""How much of reading layers goes on while layers are computed, of spans in any unit of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Interval = tuple[float, float]  # (begin, end)


class Overlap(NamedTuple):
    """For how long layers were read, and computed, and for how long at least one of both went on."""

    read: float
    compute: float
    busy: float

    @classmethod
    def within(cls, begin: float, end: float, reads: Sequence[Interval], computed: Sequence[Interval]) -> Overlap:
        """Counts the spans between two times, and of longer spans the part between them."""
        parts = [[(max(one, begin), min(two, end)) for one, two in spans] for spans in (reads, computed)]
        read, compute = ([part for part in of_kind if part[1] > part[0]] for of_kind in parts)
        return cls(_covered(read), _covered(compute), _covered([*read, *compute]))

    @property
    def hidden(self) -> float | None:
        """The part of the shorter of reading and computing that went on while the other did, 0 to 1; None: nothing was
        read, or nothing computed.
        """
        shorter = min(self.read, self.compute)
        if shorter <= 0:
            return None
        return min(1.0, max(0.0, (self.read + self.compute - self.busy) / shorter))  # which rounding may pass


def _covered(intervals: Sequence[Interval]) -> float:
    """The length of what the intervals cover together."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total
