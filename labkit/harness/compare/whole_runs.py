"""Rounds of whole generations, for sides that cannot pause in the middle of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic

from labkit.harness.compare.loaded_side import comparison_device
from labkit.harness.compare.measured_side import MeasuredSide, Ran
from labkit.harness.compare.plan import Schedule
from labkit.harness.compare.sampling import Sampling, Steps, Turns
from labkit.harness.roofline import probe_bandwidth
from labkit.harness.rounds import turns
from labkit.statistics.sequential import ROUNDS


class WholeRuns(Sampling):
    """A round is one run of each side, in random order. The read bandwidth is probed before and after each run."""

    rule = ROUNDS

    def __init__(
        self,
        sides: list[MeasuredSide],
        schedule: Schedule,
        decided: Callable[[Turns], bool],
        steps: Steps,
        *,
        why_rounds: str,
    ) -> None:
        super().__init__(sides, schedule, decided, steps)
        self._why_rounds = why_rounds

    def run(self) -> None:
        device = comparison_device()

        def probe(index: int) -> float | None:
            return probe_bandwidth(self.sides[index].spec.cores, device)

        runs = [self._announced(side) for side in self.sides]
        for turn in turns(runs, self._indices(), probe=probe, seed=self._schedule.seed):
            self.sides[turn.side].note(turn)
        self._others.end()

    def result(self) -> Turns:
        return Turns(**self._measurements(), why_rounds=self._why_rounds)

    def _announced(self, side: MeasuredSide) -> Callable[[int], Ran]:
        """A function that announces a run of a side and makes it."""

        def run(index: int) -> Ran:
            self._steps.begin(f"{self._schedule.numbered('round', index + 1, self.rule)}: {side.name}")
            return side.run(index)

        return run

    def _indices(self) -> Iterator[int]:
        """The number of each round, until the schedule is done, the verdict is clear or the budget is spent."""
        started, done = monotonic(), 0
        while True:
            yield done
            done += 1
            self._others.end_round()
            if self._is_over(done, started):
                return
