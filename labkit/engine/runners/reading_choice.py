"""Which way to read the weights is the fastest: found out on the decode steps themselves, again and again.

The ways differ by up to a fifth, and which one leads depends on the processor, on the shapes, and on what other guests
of a shared machine ask of its memory. So the first steps take the ways in turns, the fastest serves, and every few
seconds a round of turns looks whether it still leads. The ways of a round follow each other at once, so they share the
memory's mood, and only times of one round are compared with each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from labkit.kernels.reading import READINGS, USUAL, wanted_reading

ROUNDS = 7  # the latest, by which the ways are judged
MORE = 5  # rounds that follow at once where another way was faster: with them six of seven say so, or it was chance
BETTER = 0.97  # of the chosen way's time: what another has to fall below, since times scatter
PAUSE_NS = 2e9  # of stepping, between two looks
COST = 0.003  # of all time may go into steps that take longer than the chosen way's


class ReadingChoice:
    """Among `ways`, for steps of one kind: each step goes the way `next` and then tells its time with `took`.

    chosen: the way that serves. changes: how often another took over, the first choice not counted.
    """

    def __init__(self, ways: Sequence[int]) -> None:
        self.chosen, self.changes = ways[0], 0
        self._ways = tuple(ways)
        self._rounds: deque[dict[int, int]] = deque(maxlen=ROUNDS)  # ns by way
        self._round: dict[int, int] = {}  # the one under way
        self._turns: list[int] = []  # what is left of it, the next one last
        self._begun = 0
        self._more, self._lost_ns, self._pause_ns = MORE, 0, inf
        if len(self._ways) > 1:
            self._begin_round()

    @property
    def next(self) -> int:
        """The way of the step that follows."""
        return self._turns[-1] if self._turns else self.chosen

    def took(self, ns: int) -> None:
        """Notes how long the step took that went the way `next`."""
        if self._turns:
            self._round[self._turns.pop()] = ns
            if not self._turns:
                self._end_round()
            return
        self._pause_ns -= ns
        if self._pause_ns <= 0:
            self._begin_round()

    def _begin_round(self) -> None:
        """In each round another way comes first, since the first pays for what the step before left in the caches."""
        first = self._begun % len(self._ways)
        self._begun += 1
        self._turns = [*self._ways[first:], *self._ways[:first]]

    def _end_round(self) -> None:
        found, self._round = self._round, {}
        self._rounds.append(found)
        self._lost_ns += sum(max(0, ns - found[self.chosen]) for ns in found.values())
        if len(self._rounds) < ROUNDS:
            return self._begin_round()
        first_choice = self._begun == ROUNDS
        if (fastest := self._fastest()) != self.chosen:
            self.chosen = fastest
            self.changes += not first_choice
        elif self._more and not first_choice and min(found.values()) < BETTER * found[self.chosen]:
            self._more -= 1
            return self._begin_round()
        self._pause_ns = max(PAUSE_NS, self._lost_ns / COST)
        self._more, self._lost_ns = MORE, 0

    def _fastest(self) -> int:
        """By the median of its times over the chosen way's in the same rounds. The chosen one, unless another's median
        leads clearly and it was faster in all rounds but one.
        """
        shares = {way: sorted(times[way] / times[self.chosen] for times in self._rounds) for way in self._ways}
        best = min(shares, key=lambda way: shares[way][ROUNDS // 2])
        return best if shares[best][ROUNDS // 2] < BETTER and shares[best][-2] < 1 else self.chosen


class ReadingChoices:
    """The choices of an engine: one for each number of rows that its decode steps have, since more rows compute longer
    between two lines of weights. `LABKIT_READ` fixes the way of all steps.
    """

    def __init__(self) -> None:
        self.fix(wanted_reading())

    def fix(self, way: int | None) -> None:
        """From now on every step goes this way; None: they choose anew."""
        self._ways = range(len(READINGS)) if way is None else (way,)
        self._untimed = ReadingChoice((USUAL if way is None else way,))
        self._by_rows: dict[int, ReadingChoice] = {}
        self._latest: ReadingChoice | None = None

    def of(self, batch: int, tokens: int) -> ReadingChoice:
        """For a step of so many sequences and new tokens of each; several tokens are a prompt, which comes once."""
        if tokens > 1:
            return self._untimed
        if (choice := self._by_rows.get(batch)) is None:
            choice = self._by_rows[batch] = ReadingChoice(self._ways)
        self._latest = choice
        return choice

    def __str__(self) -> str:
        """What serves the latest kind of decode step, and how often it changed; empty before the first one."""
        if (choice := self._latest) is None:
            return ""
        changes = f", changed {choice.changes} times" if choice.changes else ""
        return READINGS[choice.chosen] + changes
