"""How many rounds or epochs are enough: a fixed number, or looks at them until they answer the schedule's question. And
how many steps a turn has: enough that its first step, which does not count, is the smaller part of its time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from labkit.harness.compare.plan import Schedule
from labkit.statistics.sequential import Rule

FEWEST_PAIRS, MOST_PAIRS = 4, 24  # of an epoch
EPOCH_S = 1.0  # after which an epoch with enough pairs ends
TURN_MS = 40  # of the fastest side: longer than the first step, and shorter than the memory keeps its rate
FEWEST_STEPS, USUAL_STEPS, MOST_STEPS = 3, 4, 24  # of a turn, with its first one, which does not count
Epoch = TypeVar("Epoch")


def epoch_goes_on(pairs: int, started: float, fewest: int = FEWEST_PAIRS) -> bool:
    """Whether an epoch that has `pairs` pairs gets another one. `started`: when it began, by `monotonic`."""
    return pairs < fewest or (pairs < MOST_PAIRS and monotonic() - started < EPOCH_S)


def usual_steps(fastest_ms: float) -> int:
    """The steps of a turn, for the fastest step of all sides. Three or more count, so that their median does not follow
    a single disturbed one.
    """
    return min(max(1 + math.ceil(TURN_MS / fastest_ms), USUAL_STEPS), MOST_STEPS)


def next_steps(left: int, usual: int) -> int:
    """The steps of the next turn, if a generation has `left` more: the last turn takes all of them, so that none is too
    short.
    """
    return left if left < usual + USUAL_STEPS else usual


class Looks:
    """The looks of one measurement at its rounds or epochs."""

    def __init__(self, schedule: Schedule, rule: Rule, expect: Callable[[int], None]) -> None:
        """`expect`: gets the number of further rounds or epochs until the next look."""
        self._budget_s, self._rule, self._least = schedule.budget_s, rule, schedule.least(rule)
        self._expect = expect
        self.taken: list[int] = []  # the number of rounds or epochs at each look; stays empty without a budget
        self.next = self._least

    def is_over(self, done: int, started: float, answered: Callable[[], bool]) -> bool:
        """Whether `done` rounds or epochs are enough.

        started: when the first of them began, by `monotonic`.
        answered: whether they answer the question. It is called in a look only.
        """
        if self._budget_s is None:
            return done == self._least
        spent = done >= self._least and monotonic() - started >= self._budget_s
        if done != self.next and not spent:
            return False
        self.taken.append(done)
        if spent or answered():
            return True
        self.next = self._rule.next_look(done)
        self._expect(self.next - done)
        return False

    def collect(
        self,
        epochs: list[Epoch],
        measure: Callable[[], Epoch],
        is_over: Callable[[], bool],
        after: Callable[[], None] = lambda: None,
    ) -> bool:
        """Appends measured epochs to `epochs` until it is over, and calls `after` after each. Returns whether the user
        interrupted it. An interrupt before two epochs are complete is raised.
        """
        try:
            while not (epochs and is_over()):
                epochs.append(measure())
                after()
        except KeyboardInterrupt:
            done = len(epochs)
            if done < 2:
                raise
            if self._budget_s is not None and done not in self.taken:
                self.taken.append(done)
            return True
        return False
