"""Common parts of both ways to measure sides beside each other: whole runs in rounds, and turns of a few tokens in
epochs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.harness.compare.measured_side import MeasuredSide
from labkit.harness.compare.plan import Schedule
from labkit.harness.comparison import Comparison
from labkit.harness.quiet import OthersByRound
from labkit.harness.records import Measurement
from labkit.harness.runs import SharedWeights
from labkit.harness.turns.looks import Looks
from labkit.statistics.resolution import TellsApart
from labkit.statistics.sequential import Rule
from labkit.system.progress import Progress


@dataclass(frozen=True)
class Turns:
    """Sides that were measured beside each other."""

    sides: tuple[Measurement, ...]  # in the order of the arguments
    tokens: tuple[list[Any], ...]  # [generation][sequence, position] of each side
    looks: tuple[int, ...] = ()  # rounds or epochs after which the verdict was checked; empty: their number was fixed
    why_rounds: str = ""  # why whole generations took turns; empty: turns had a few tokens
    dropped_pairs: int = 0  # of turns, because the clock of the machine jumped
    interrupted: bool = False  # by the user, before the schedule was done
    shared_weights: SharedWeights | None = None  # of sides of two versions
    tells_apart: TellsApart | None = None  # by the machine; smaller differences count as none

    def comparison(self, baseline: int, candidate: int) -> Comparison:
        """Comparison of two of the sides, by their indices."""
        difference = first_difference(self.tokens[baseline], self.tokens[candidate])
        return Comparison(
            baseline=self.sides[baseline],
            candidate=self.sides[candidate],
            tokens_equal=difference is None,
            first_difference=difference,
            looks=self.looks,
            why_rounds=self.why_rounds,
            dropped_pairs=self.dropped_pairs,
            interrupted=self.interrupted,
            shared_weights=self.shared_weights,
            tells_apart=self.tells_apart,
        )

    @property
    def with_last(self) -> list[Comparison]:
        """The last side against every other side."""
        return [self.comparison(index, -1) for index in range(len(self.sides) - 1)]


def last_is_decided(turns: Turns) -> bool:
    """Whether there is a verdict on the last side against every other side, with an interval that is narrow enough to
    quote.
    """
    return _are_decided(turns.with_last)


def first_is_decided(turns: Turns) -> bool:
    """Whether there is a verdict on every other side against the first, with an interval that is narrow enough to
    quote.
    """
    return _are_decided([turns.comparison(0, index) for index in range(1, len(turns.sides))])


def _are_decided(comparisons: Sequence[Comparison]) -> bool:
    return all(comparison.trust().decides(comparison.ratio("per_token")) for comparison in comparisons)


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """The earliest position at which the tokens [generation][sequence, position] of two sides differ, or None."""
    differences = [
        _first_of_generation(np.asarray(ours), np.asarray(theirs)) for ours, theirs in zip(a, b, strict=True)
    ]
    return min((position for position in differences if position is not None), default=None)


def _first_of_generation(a: Any, b: Any) -> int | None:
    if a.shape != b.shape:
        return min(a.shape[-1], b.shape[-1])
    positions = np.nonzero((a != b).any(axis=0))[0]
    return int(positions[0]) if len(positions) else None


class Sampling(ABC):
    """Measures loaded sides beside each other, a fixed number of times or until the schedule's question is answered."""

    rule: Rule

    def __init__(
        self, sides: list[MeasuredSide], schedule: Schedule, decided: Callable[[Turns], bool], steps: Steps
    ) -> None:
        self.sides, self._schedule, self._decided, self._steps = sides, schedule, decided, steps
        self._others = OthersByRound([pid for side in sides for pid in side.process.pids])
        self._looks = Looks(schedule, self.rule, lambda more: steps.expect(more * len(sides)))

    @abstractmethod
    def run(self) -> None:
        """Measures until the schedule is done. The sides keep what was measured."""

    @abstractmethod
    def result(self) -> Turns:
        """The measurements so far."""

    def _measurements(self) -> dict[str, Any]:
        """The fields of `Turns` that do not depend on the way of sampling."""
        return {
            "sides": tuple(side.measurement(self._others.cores) for side in self.sides),
            "tokens": tuple(side.tokens for side in self.sides),
            "looks": tuple(self._looks.taken),
        }

    def _is_over(self, done: int, started: float) -> bool:
        """Whether `done` rounds or epochs are enough. `started`: when the first of them began, by `monotonic`."""
        return self._looks.is_over(done, started, lambda: self._is_answered(self.result()))

    def _is_answered(self, turns: Turns) -> bool:
        precision = self._schedule.precision
        if precision is None:
            return self._decided(turns)
        return all(comparison.ratio("per_token").is_narrow(precision) for comparison in turns.with_last)


class Steps:
    """Counts the steps of a comparison for its progress display."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._begun, self._total, self._progress = 0, total, progress

    def expect(self, more: int) -> None:
        self._total += more

    def begin(self, label: str, steps: int = 1) -> None:
        """Begins what counts as this many steps."""
        self._report(self._begun, label)
        self._begun += steps

    def end(self) -> None:
        self._report(max(self._begun, self._total), "done")

    def _report(self, done: int, label: str) -> None:
        if self._progress:
            self._progress(done, self._total, label)
