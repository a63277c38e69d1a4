"""Rounds: whatever is compared takes turns, in a new random order in each round, with the memory probed beside it.

A shared machine drifts within seconds. Sides that run in the same round share its mood, and a probe just before and
just after a run tells which read bandwidth that run had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np

Found = TypeVar("Found")


@dataclass(frozen=True)
class Turn(Generic[Found]):
    """One run of one side, and the GB/s read just before and just after it (None: no probe here).

    `side` is the side's place in the sequence given to `turns`.
    """

    round: int
    side: int
    found: Found
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Probed(Generic[Found]):
    """What a call returned, and the GB/s read just before and just after it."""

    found: Found
    before: float | None
    after: float | None

    @property
    def bandwidth_gb_s(self) -> float | None:
        """The mean of both probes."""
        return None if self.before is None or self.after is None else (self.before + self.after) / 2


def random_orders(sides: int, *, seed: int = 0) -> Iterator[list[int]]:
    """For each round the order of the sides: permutations of their places without end, the same for the same seed."""
    generator = np.random.default_rng(seed)
    while True:
        yield generator.permutation(sides).tolist()


def probed(run: Callable[[], Found], probe: Callable[[], float | None]) -> Probed[Found]:
    """Calls `run` between two probes."""
    before = probe()
    found = run()
    return Probed(found, before, probe())


def turns(
    sides: Sequence[Callable[[int], Found]],
    rounds: Iterable[int],
    *,
    probe: Callable[[int], float | None],
    seed: int = 0,
) -> Iterator[Turn[Found]]:
    """Every side once in each round, in random order, probed before and after.

    `sides` are called with the number of the round and `probe` with the place of the side. A turn is yielded as soon as
    it is over; the next one starts when the caller asks for it. So `rounds` may be `itertools.count()`, and a caller
    that stops iterating after `len(sides)` turns has whole rounds.
    """
    for index, order in zip(rounds, random_orders(len(sides), seed=seed), strict=False):
        for side in order:
            done = probed(partial(sides[side], index), partial(probe, side))
            yield Turn(index, side, done.found, done.before, done.after)
