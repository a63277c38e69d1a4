"""Into how many micro-batches the rows of a call are divided, on its way from the prompts to the last token.

With "auto" the first tokens of a call are a trial: laps in several micro-batches and in one, in turns. All that is
measured are tokens of the texts, so that it costs what the slower way loses, and twice the time until all stages are
at work again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple

from labkit.engine.parallel.micro_batch_counts import PAIRS, Compared, MicroBatchCounts

TIMED = 3  # tokens of a lap whose times count
UNTIMED = 1  # before them, while the stages fill
TRIAL_TOKENS = 1 + 2 * PAIRS * (UNTIMED + TIMED)  # of the longest trial, with the one behind the prompt
FEW = 2  # rows are divided anew when no more than one in so many is left


class Lap(NamedTuple):
    """Until when the rows go on in so many micro-batches: until their texts have `until` tokens, prompt included; None:
    until few are left, or none.
    """

    micro_batches: int
    until: int | None


@dataclass(frozen=True)
class Division:
    """How a call begins, and what it allows. stages: that are to have work. rows: in so many `micro_batches`, with
    prompts of so many tokens.

    again: rows may be divided anew on the way. tries: one micro-batch may be tried in place of several. longest: tokens
    that a text can have; None: unknown.
    """

    stages: int
    rows: int
    micro_batches: int
    prompt: int
    again: bool
    tries: bool
    longest: int | None


class Chooser:
    """The laps of a call that has begun. counts: what was measured in earlier ones, and is in this. shared: makes a
    time the same on all ranks of the stage. tell: is told what has been decided.
    """

    def __init__(
        self,
        begun: Division,
        counts: MicroBatchCounts,
        shared: Callable[[float], float],
        tell: Callable[[Compared], None],
    ) -> None:
        self._begun, self._counts, self._shared, self._tell = begun, counts, shared, tell
        self._rows = begun.rows  # when they were divided
        self._several_ms: float | None = None  # of the lap before, where it is the first of a pair
        self._stamps: dict[int, int] = {}  # when all micro-batches had a token, by its place in the text
        self._timed: range | None = None  # the places of the tokens behind which those come whose times count

    def first(self) -> Lap:
        """The lap with the prompts, which fill all stages in any case."""
        begun = self._begun
        lap = self._lap(begun.rows, begun.prompt + 1)
        return Lap(begun.micro_batches, begun.prompt + 1 if lap.micro_batches < begun.micro_batches else lap.until)

    def next(self, rows: int, tokens: int) -> Lap:
        """The lap that follows, with so many rows left, whose texts have so many tokens."""
        timed, self._timed = self._timed, None
        broken = timed is not None and (rows != self._rows or tokens != timed.stop)
        self._rows = rows
        if broken:
            self._several_ms = None
            return Lap(self.several(rows), None)
        if timed is not None:
            self._note(timed)
        return self._lap(rows, tokens)

    def chose(self, tokens: int) -> None:
        """A micro-batch has its next token; its texts have so many now."""
        if self._timed is not None:
            self._stamps[tokens] = perf_counter_ns()

    def several(self, rows: int) -> int:
        """Micro-batches of as many rows each as at the beginning, but one for each stage."""
        begun = self._begun
        as_large = -(-begun.micro_batches * rows // begun.rows)
        return min(rows, max(as_large, min(begun.stages, begun.micro_batches)))

    def pauses(self, sizes: Sequence[int], tokens: int) -> bool:
        """Whether the rows are to be divided anew: they have become few, in micro-batches of these `sizes`, and it
        would be another division.
        """
        rows = sum(sizes)
        if not self._begun.again or self._timed is not None or not rows or rows * FEW > self._rows:
            return False
        wanted = self._wanted(rows, tokens)
        return wanted is None or len(sizes) > wanted or max(sizes) > -(-rows // wanted)

    def _wanted(self, rows: int, tokens: int) -> int | None:
        """How many micro-batches are the right ones; None: that is to be tried."""
        begun, several = self._begun, self.several(rows)
        if not begun.tries or several == 1:
            return several
        if (chosen := self._counts.chosen(rows, begun.prompt)) is not None:
            return 1 if chosen == 1 else several
        laps = 2 if self._several_ms is None else 1
        room = begun.longest is None or tokens + laps * (UNTIMED + TIMED) < begun.longest
        return None if room else several

    def _lap(self, rows: int, tokens: int) -> Lap:
        """From texts of so many tokens on."""
        wanted = self._wanted(rows, tokens)
        if wanted is not None:
            return Lap(wanted, None)
        begin = tokens + UNTIMED
        self._timed, self._stamps = range(begin, begin + TIMED), {}
        return Lap(self.several(rows) if self._several_ms is None else 1, begin + TIMED)

    def _note(self, timed: range) -> None:
        """What a lap took, which is over."""
        took = self._shared(median(self._stamps[place + 1] - self._stamps[place] for place in timed) / 1e6)
        before, self._several_ms = self._several_ms, None
        if before is None:
            self._several_ms = took
            return
        several = self.several(self._rows)
        trial = self._counts.trial(self._rows, self._begun.prompt, several).followed_by(before, took)
        self._counts.note(trial)
        if trial.chosen is not None:
            self._tell(trial)
