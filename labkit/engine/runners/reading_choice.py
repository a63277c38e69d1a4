"""Choice of the fastest way to read the weights, measured repeatedly on the decode steps themselves.

The ways differ by up to a fifth. Which one is fastest depends on the processor, on the shapes, and on the memory
traffic of other guests of a shared machine. So the first steps use the ways in turns, and the fastest way is chosen.
Every few seconds a round of turns checks the choice. The turns of a round follow each other directly, so they meet the
same memory traffic, and only times of one round are compared with each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from labkit.kernels.reading import READINGS, USUAL, wanted_reading

ROUNDS = 7  # the ways are judged by this number of latest rounds
MORE = 5  # further rounds at once after another way was faster: six of seven rounds have to confirm it
BETTER = 0.97  # share of the chosen way's time that another way has to beat, since times scatter
PAUSE_NS = 2e9  # step time between two checks
COST = 0.003  # share of all time that checks may lose to ways slower than the chosen one


class ReadingChoice:
    """Choice among `ways` for steps of one kind. Each step uses the way `next`, and then reports its time to `took`.

    chosen: the fastest way so far.
    changes: number of changes of `chosen` after the first choice.
    """

    def __init__(self, ways: Sequence[int]) -> None:
        self.chosen, self.changes = ways[0], 0
        self._ways = tuple(ways)
        self._rounds: deque[dict[int, int]] = deque(maxlen=ROUNDS)  # ns by way
        self._round: dict[int, int] = {}  # the present round
        self._turns: list[int] = []  # remaining ways of the present round, the next one last
        self._begun = 0
        self._more, self._lost_ns, self._pause_ns = MORE, 0, inf
        if len(self._ways) > 1:
            self._begin_round()

    @property
    def next(self) -> int:
        """The way that the next step has to use."""
        return self._turns[-1] if self._turns else self.chosen

    def took(self, ns: int) -> None:
        """Notes the time of the step that used the way `next`."""
        if self._turns:
            self._round[self._turns.pop()] = ns
            if not self._turns:
                self._end_round()
            return
        self._pause_ns -= ns
        if self._pause_ns <= 0:
            self._begin_round()

    def _begin_round(self) -> None:
        """Begins a round with another way than the last round: the first turn suffers from the step before, which
        filled the caches.
        """
        first = self._begun % len(self._ways)
        self._begun += 1
        self._turns = [*self._ways[first:], *self._ways[:first]]

    def _end_round(self) -> None:
        times, self._round = self._round, {}
        self._rounds.append(times)
        self._lost_ns += sum(max(0, ns - times[self.chosen]) for ns in times.values())
        if len(self._rounds) < ROUNDS:
            return self._begin_round()
        first_choice = self._begun == ROUNDS
        if (fastest := self._fastest()) != self.chosen:
            self.chosen = fastest
            self.changes += not first_choice
        elif self._more and not first_choice and min(times.values()) < BETTER * times[self.chosen]:
            self._more -= 1
            return self._begin_round()
        self._pause_ns = max(PAUSE_NS, self._lost_ns / COST)
        self._more, self._lost_ns = MORE, 0

    def _fastest(self) -> int:
        """Returns the fastest way by the median of its times, each divided by the chosen way's time in the same round.
        Returns the chosen way unless another has a clearly lower median and was faster in all rounds except one.
        """
        shares = {way: sorted(times[way] / times[self.chosen] for times in self._rounds) for way in self._ways}
        best = min(shares, key=lambda way: shares[way][ROUNDS // 2])
        return best if shares[best][ROUNDS // 2] < BETTER and shares[best][-2] < 1 else self.chosen


class ReadingChoices:
    """Choices of an engine, one for each number of rows of its decode steps, since more rows compute longer between two
    lines of weights. `LABKIT_READ` fixes the way of all steps.
    """

    def __init__(self) -> None:
        self.fix(wanted_reading())

    def fix(self, way: int | None) -> None:
        """Makes every step use `way` from now on; None: steps choose anew."""
        self._ways = range(len(READINGS)) if way is None else (way,)
        self._untimed = ReadingChoice((USUAL if way is None else way,))
        self._by_rows: dict[int, ReadingChoice] = {}
        self._latest: ReadingChoice | None = None

    def of(self, batch: int, tokens: int) -> ReadingChoice:
        """Returns the choice for a step of `batch` sequences with `tokens` new tokens each. Prompts (several tokens)
        are not timed, since each comes only once.
        """
        if tokens > 1:
            return self._untimed
        if (choice := self._by_rows.get(batch)) is None:
            choice = self._by_rows[batch] = ReadingChoice(self._ways)
        self._latest = choice
        return choice

    def __str__(self) -> str:
        """The way of the latest kind of decode step, and its number of changes; empty before the first decode step."""
        if (choice := self._latest) is None:
            return ""
        changes = f", changed {choice.changes} times" if choice.changes else ""
        return READINGS[choice.chosen] + changes
