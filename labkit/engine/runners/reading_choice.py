"""Choice of the fastest way to read the weights, measured repeatedly on the decode steps themselves.

Some ways differ by a few percent, others take twice as long. Which one is fastest depends on the processor, on the
shapes, and on the memory traffic of other guests of a shared machine. So the first steps use the ways in turns, until
the fastest way is clear. The turns of a round follow each other directly, so they meet the same memory traffic, and
only times of one round are compared with each other. The result is kept for the next process (`kept_readings`).

Later one step tries another way, about once a second. Only if it takes less time than the latest steps of the chosen
way, these two race; a race of all ways would cost half a second at half of the speed. A disturbance makes steps longer
and never shorter, so it starts no race.

Two processes with the same engine have to come to the same way, or to ways that are equally fast: else one of them is
faster for as long as both run. Seven rounds told ways apart that differ by a tenth; processes that stopped there kept
ways that differed by 1 to 4 % (gpt2 in bfloat16, Zen 3). So a way leaves a race only when it is clearly slower.

Ways that are equally fast where the weights lie at first may differ by 2 % on average over other places (gpt2 in
bfloat16, l2-2k and l2-6k). A short race after each move of the weights was tried: on a busy host its five rounds chose
worse ways, and int8 steps took 2 to 6 % longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf, sqrt
from statistics import median

from labkit.engine.runners.kept_readings import KeptReadings
from labkit.engine.team_size import team_size
from labkit.kernels.reading import READINGS, USUAL, wanted_reading

LEAST_ROUNDS, MOST_ROUNDS = 7, 64  # of a race; 64 rounds tell ways apart that differ by 2 % where steps scatter by 5 %
CLEAR = 2.6  # standard deviations of the sign test beyond which a way is clearly slower
BETTER = 0.97  # share of the chosen way's time with which another way begins a race
LATEST = 8  # steps of the chosen way whose median a trial is compared with
PAUSE_NS = 1e9  # step time between two trials
SOON_NS = 0.2e9  # the same after a start with a kept way, until all others have been tried
COST = 0.003  # share of all time that trials and races may lose to ways slower than the chosen one


class Race:
    """Rounds in which each remaining way serves one step. From `LEAST_ROUNDS` on, ways that are clearly slower than the
    fastest one leave. A sign test decides, since times have outliers.
    """

    def __init__(self, ways: Sequence[int]) -> None:
        self.left = tuple(ways)
        self.rounds = 0
        self._ns: dict[int, list[int]] = {way: [] for way in ways}  # by way, one for each of its rounds

    def add(self, times: dict[int, int]) -> None:
        """Notes a round: the ns of a step for each remaining way."""
        self.rounds += 1
        for way, ns in times.items():
            self._ns[way].append(ns)
        if self.rounds >= LEAST_ROUNDS:
            fastest = self.fastest
            self.left = tuple(way for way in self.left if not self._clearly_slower(way, fastest))

    @property
    def over(self) -> bool:
        return len(self.left) == 1 or self.rounds >= MOST_ROUNDS

    @property
    def fastest(self) -> int:
        """The way with the lowest median of its times, each divided by the first way's time in the same round."""
        base = self._ns[self.left[0]]
        return min(self.left, key=lambda way: median(ns / other for ns, other in zip(self._ns[way], base, strict=True)))

    def lost_ns(self, chosen: int) -> float:
        """The time that the rounds took beyond steps of the way `chosen`."""
        losses_by_way = (
            [ns - other for ns, other in zip(times, self._ns[chosen], strict=False)] for times in self._ns.values()
        )
        return sum(len(losses) * max(0, median(losses)) for losses in losses_by_way)

    def _clearly_slower(self, way: int, fastest: int) -> bool:
        slower = sum(ns > other for ns, other in zip(self._ns[way], self._ns[fastest], strict=True))
        return slower > (self.rounds + CLEAR * sqrt(self.rounds)) / 2


class ReadingChoice:
    """Choice among `ways` for steps of one kind. Each step uses the way `next`, and then reports its time to `took`.

    chosen: the fastest way so far.
    changes: number of changes of `chosen` after the first choice.
    """

    def __init__(
        self, ways: Sequence[int], *, kept: int | None = None, keep: Callable[[int], None] = lambda way: None
    ) -> None:
        """kept: the way that an earlier process chose, which then is the first choice; it may have become slow, so the
        other ways are tried soon. None: all ways race for the first choice. keep: gets each new choice.
        """
        self.chosen, self.changes = ways[0] if kept is None else kept, 0
        self._ways, self._keep = tuple(ways), keep
        self._race: Race | None = None  # None: a single way is tried, or none
        self._first_choice = kept is None
        self._round: dict[int, int] = {}  # ns by way, in the present round
        self._turns: list[int] = []  # ways of the next steps, the next one last
        self._begun = 0
        self._tried = 0  # ways so far
        self._latest: deque[float] = deque(maxlen=LATEST)  # ns of steps of the chosen way
        self._pause_ns = inf
        self._soon = 0  # trials with a short pause before
        if len(self._ways) == 1:
            return
        if kept is not None:
            self._pause_ns, self._soon = SOON_NS, len(self._ways) - 1
            return
        self._race = Race(ways)
        self._begin_round(self._race)

    @property
    def next(self) -> int:
        """The way that the next step has to use."""
        return self._turns[-1] if self._turns else self.chosen

    @property
    def compares(self) -> bool:
        """Whether the next step is timed to compare it with others."""
        return bool(self._turns)

    def took(self, ns: int, steps: int = 1) -> None:
        """Notes the time of the step, or of `steps` steps that are not compared, that used the way `next`."""
        if not self._turns:
            self._latest.extend([ns / steps] * min(steps, LATEST))
            self._pause_ns -= ns
            if self._pause_ns <= 0 and len(self._latest) == LATEST:
                others = [way for way in self._ways if way != self.chosen]
                self._turns = [others[self._tried % len(others)]]
                self._tried += 1
            return
        way = self._turns.pop()
        if self._race is None:
            self._end_trial(way, ns)
            return
        self._round[way] = ns
        if not self._turns:
            self._end_round(self._race)

    def _end_trial(self, way: int, ns: int) -> None:
        usual = median(self._latest)
        if ns < BETTER * usual:
            self._race = Race((self.chosen, way))
            self._begin_round(self._race)
        else:
            self._pause(ns - usual)

    def _begin_round(self, race: Race) -> None:
        """Begins a round with another way than the last round: the first turn suffers from the step before, which
        filled the caches.
        """
        first = self._begun % len(race.left)
        self._begun += 1
        self._turns = [*race.left[first:], *race.left[:first]]

    def _end_round(self, race: Race) -> None:
        race.add(self._round)
        self._round = {}
        if not self._is_decided(race):
            self._begin_round(race)
            return
        self._race = None
        if self._first_choice:
            self.chosen, self._first_choice = race.fastest, False
            self._keep(self.chosen)
            self._pause(0.0)
            return
        self._pause(race.lost_ns(self.chosen))
        if self.chosen not in race.left:
            self.chosen = race.fastest
            self.changes += 1
            self._keep(self.chosen)

    def _is_decided(self, race: Race) -> bool:
        """Whether the fastest way is clear, or the chosen one leads in a later race."""
        leads = not self._first_choice and race.rounds >= LEAST_ROUNDS and race.fastest == self.chosen
        return race.over or leads

    def _pause(self, lost_ns: float) -> None:
        """Begins a pause after a trial or a race that lost this time."""
        self._latest.clear()
        self._soon = max(0, self._soon - 1)
        self._pause_ns = SOON_NS if self._soon else max(PAUSE_NS, lost_ns / COST)


class ReadingChoices:
    """Choices of an engine, one for each number of rows of its decode steps, since more rows compute longer between two
    lines of weights. `LABKIT_READ` fixes the way of all steps.
    """

    def __init__(self, kept: KeptReadings | None = None) -> None:
        """kept: the choices of earlier processes; None: nothing is kept."""
        self._kept = kept
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
            choice = self._by_rows[batch] = self._new_choice(batch)
        self._latest = choice
        return choice

    def _new_choice(self, rows: int) -> ReadingChoice:
        if self._kept is None or len(self._ways) == 1:
            return ReadingChoice(self._ways)
        threads = team_size()
        kept = self._kept.way(threads, rows)
        return ReadingChoice(self._ways, kept=kept, keep=partial(self._kept.keep, threads, rows))

    def __str__(self) -> str:
        """The way of the latest kind of decode step, and its number of changes; empty before the first decode step."""
        if (choice := self._latest) is None:
            return ""
        changes = f", changed {choice.changes} times" if choice.changes else ""
        return READINGS[choice.chosen] + changes
