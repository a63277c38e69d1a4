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

Result = TypeVar("Result")


@dataclass(frozen=True)
class Probed(Generic[Result]):
    """The result of a call, and the GB/s read just before and just after it."""

    result: Result
    before: float | None  # None: no probe
    after: float | None


@dataclass(frozen=True)
class Turn(Probed[Result]):
    """One run of one side."""

    round: int
    side: int  # index in the sequence that `turns` got


def random_orders(sides: int, *, seed: int = 0) -> Iterator[list[int]]:
    """Endless random orders of the sides' indices, one for each round; the same for the same seed."""
    generator = np.random.default_rng(seed)
    while True:
        yield generator.permutation(sides).tolist()


def probed(run: Callable[[], Result], probe: Callable[[], float | None]) -> Probed[Result]:
    """Calls `run` between two probes."""
    before = probe()
    result = run()
    return Probed(result, before, probe())


def turns(
    sides: Sequence[Callable[[int], Result]],
    rounds: Iterable[int],
    *,
    probe: Callable[[int], float | None],
    seed: int = 0,
) -> Iterator[Turn[Result]]:
    """Yields a turn of every side in each round, in random order, probed before and after.

    `sides` are called with the number of the round, and `probe` with the index of the side. A turn is yielded as soon
    as it is over; the next one starts when the caller asks for it. So `rounds` may be `itertools.count()`, and a caller
    that stops after a multiple of `len(sides)` turns has whole rounds.
    """
    for index, order in zip(rounds, random_orders(len(sides), seed=seed), strict=False):
        for side in order:
            run = probed(partial(sides[side], index), partial(probe, side))
            yield Turn(run.result, run.before, run.after, round=index, side=side)
