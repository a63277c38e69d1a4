"""Rounds: the sides of a comparison take turns, in a new random order in each round. Each turn is probed.

A shared machine drifts within seconds. Sides that run in the same round meet the same machine. A probe just before and
just after a run measures the read bandwidth that the run had.
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
    """One run of one side."""

    round: int
    side: int  # index in the sequence that `turns` got
    found: Found  # the run's result
    before: float | None  # GB/s read just before the run; None: no probe
    after: float | None  # GB/s read just after the run


@dataclass(frozen=True)
class Probed(Generic[Found]):
    """The result of a call, and the GB/s read just before and just after it."""

    found: Found
    before: float | None
    after: float | None

    @property
    def bandwidth_gb_s(self) -> float | None:
        """The mean of both probes."""
        return None if self.before is None or self.after is None else (self.before + self.after) / 2


def random_orders(sides: int, *, seed: int = 0) -> Iterator[list[int]]:
    """Endless random orders of the sides' indices, one for each round; the same for the same seed."""
    generator = np.random.default_rng(seed)
    while True:
        yield generator.permutation(sides).tolist()


def probed(run: Callable[[], Found], probe: Callable[[], float | None]) -> Probed[Found]:
    """Calls `run` between two probes."""
    before = probe()
    result = run()
    return Probed(result, before, probe())


def turns(
    sides: Sequence[Callable[[int], Found]],
    rounds: Iterable[int],
    *,
    probe: Callable[[int], float | None],
    seed: int = 0,
) -> Iterator[Turn[Found]]:
    """Yields a turn of every side in each round, in random order, probed before and after.

    `sides` are called with the number of the round, and `probe` with the index of the side. A turn is yielded as soon
    as it is over; the next one starts when the caller asks for it. So `rounds` may be `itertools.count()`, and a caller
    that stops after a multiple of `len(sides)` turns has whole rounds.
    """
    for index, order in zip(rounds, random_orders(len(sides), seed=seed), strict=False):
        for side in order:
            turn = probed(partial(sides[side], index), partial(probe, side))
            yield Turn(index, side, turn.found, turn.before, turn.after)
