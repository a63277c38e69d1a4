"""Epochs of sides that are calls in this process, such as the kernels of a layer. Their weights lie in one memory.

A round has a call of each side and a probe of the read bandwidth, in random order. Between epochs the weights of all
sides are put into new memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

from labkit.harness.compare.plan import Schedule
from labkit.harness.compare.sampling import Steps
from labkit.harness.quiet import OthersByRound
from labkit.harness.roofline import Rates, rates_of_epoch
from labkit.harness.turns.looks import Looks, epoch_goes_on
from labkit.harness.turns.pairs import Logs, by_epoch
from labkit.harness.turns.placing import place_anew, place_probe_anew
from labkit.statistics.sequential import EPOCHS, centre
from labkit.system.progress import Progress

Result = TypeVar("Result")


@dataclass(frozen=True)
class CallRound(Generic[Result]):
    """A call of each side, and a probe."""

    results: tuple[Result, ...]  # by side
    rates: Rates


@dataclass(frozen=True)
class CallRounds(Generic[Result]):
    """Rounds of calls, with the fields of a record about them."""

    results: tuple[tuple[Result, ...], ...]  # [round][side]
    epochs: tuple[int, ...]  # the epoch of each round, counted from 0
    bandwidth_gb_s: tuple[float, ...] | None  # read bandwidth in each round; None: no probe
    others_cores: tuple[float, ...] | None  # processors that other programs kept busy, by epoch; None: too short
    looks: tuple[int, ...]  # epochs at each look; empty: their number was fixed
    placed_anew: bool  # whether each epoch had its weights in new memory
    interrupted: bool  # by the user, before the schedule was done

    def epoch_centres(self, figures: Logs) -> list[float]:
        """The centre of each epoch, of a figure of each round."""
        return [centre(of_epoch) for of_epoch in by_epoch(figures, self.epochs)]

    @property
    def conditions(self) -> dict[str, Any]:
        """All fields but the results, by name."""
        return {name: value for name, value in vars(self).items() if name != "results"}


class CallEpochs(Generic[Result]):
    """Calls the sides in epochs, each with `tensors`, the weights of all sides, in new memory.

    The first round is a warm-up and does not count. `after` is called at the end of each epoch.
    """

    rule = EPOCHS

    def __init__(
        self,
        sides: Sequence[Callable[[], Result]],
        tensors: Sequence[Tensor],
        *,
        probe: Callable[[], Rates] = dict,
        threads: int = 1,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._sides, self._tensors, self._probe, self._after = sides, tensors, probe, after
        self._random = np.random.default_rng(0)
        self._threads = threads  # of the probe
        self._epochs: list[list[CallRound[Result]]] = []
        self._rates_gb_s: list[float | None] = []  # of each round of the complete epochs
        self._placed_anew = True

    def run(
        self,
        schedule: Schedule,
        *,
        answered: Callable[[CallRounds[Result]], bool] = lambda rounds: True,
        words: Callable[[CallRounds[Result]], str] = lambda rounds: "",
        progress: Progress | None = None,
    ) -> CallRounds[Result]:
        """Measures until the schedule is done. An interrupt (Ctrl-C) after two epochs ends it with what was measured.

        answered: whether the rounds so far answer the question of a schedule with a budget.
        words: the result so far, for the progress display.
        """
        steps = Steps(1 + schedule.least(self.rule), progress)
        looks = Looks(schedule, self.rule, steps.expect)
        steps.begin("warming up")
        self._round()
        self._others, started = OthersByRound(), monotonic()

        def epoch() -> list[CallRound[Result]]:
            done = len(self._epochs)
            so_far = words(self._so_far(looks)) if progress and done >= self.rule.first_look else ""
            steps.begin(schedule.numbered("epoch", done + 1, self.rule) + (f": {so_far}" if so_far else ""))
            return self._epoch()

        def is_over() -> bool:
            return looks.is_over(len(self._epochs), started, lambda: answered(self._so_far(looks)))

        interrupted = looks.collect(self._epochs, epoch, is_over)
        self._others.end()
        steps.end()
        return self._so_far(looks, interrupted=interrupted)

    def _epoch(self) -> list[CallRound[Result]]:
        self._placed_anew = place_anew(self._tensors).anew and self._placed_anew
        place_probe_anew()
        rounds: list[CallRound[Result]] = []
        started = monotonic()
        while epoch_goes_on(len(rounds), started):
            rounds.append(self._round())
        self._after()
        self._others.end_round()
        self._rates_gb_s += rates_of_epoch([call_round.rates for call_round in rounds], self._threads)
        return rounds

    def _round(self) -> CallRound[Result]:
        """A call of each side, and of the probe, in random order."""
        results: dict[int, Result] = {}
        rates: Rates = {}
        for index in self._random.permutation(len(self._sides) + 1).tolist():
            if index == len(self._sides):
                rates = self._probe()
            else:
                results[index] = self._sides[index]()
        return CallRound(tuple(results[index] for index in sorted(results)), rates)

    def _so_far(self, looks: Looks, *, interrupted: bool = False) -> CallRounds[Result]:
        numbered = [(number, call_round) for number, rounds in enumerate(self._epochs) for call_round in rounds]
        rates = self._rates_gb_s[: len(numbered)]
        cores = [busy for busy in self._others.cores[: len(self._epochs)] if busy is not None]
        return CallRounds(
            results=tuple(call_round.results for _, call_round in numbered),
            epochs=tuple(number for number, _ in numbered),
            bandwidth_gb_s=None if None in rates else tuple(rates),  # type: ignore[arg-type]
            others_cores=tuple(cores) or None,
            looks=tuple(looks.taken),
            placed_anew=self._placed_anew,
            interrupted=interrupted,
        )
