"""Choice of the number of micro-batches of a call, from the prompts to the last token.

With "auto" the first tokens of a call are a trial: laps with several micro-batches and with one, in turns. Laps compute
tokens of the texts, so a trial costs only the time that the slower way loses, and twice the time in which the stages
fill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple

from labkit.engine.parallel.micro_batch_counts import PAIRS, Compared, MicroBatchCounts
from labkit.system.rounding import ceil_div

TIMED = 3  # timed tokens of a lap
UNTIMED = 1  # tokens before them, while the stages fill
TRIAL_TOKENS = 1 + 2 * PAIRS * (UNTIMED + TIMED)  # tokens of the longest trial, with the first one after the prompt
FEW = 2  # rows are divided anew when at most 1 / FEW of them are left


class Lap(NamedTuple):
    """Stretch of a call with a fixed number of micro-batches."""

    micro_batches: int
    until: int | None  # length of the texts at the end, prompt included; None: until few rows are left, or none


@dataclass(frozen=True)
class Division:
    """First division of a call's rows into micro-batches, and the changes that the call allows."""

    stages: int  # each of them needs work
    rows: int
    micro_batches: int  # number at the beginning
    prompt: int  # tokens
    again: bool  # rows may be divided anew later
    tries: bool  # one micro-batch may be tried instead of several
    longest: int | None  # most tokens of a text; None: unknown


class Chooser:
    """Chooses the laps of a call that has begun.

    counts: measurements of earlier calls and this one.
    shared: makes a time the same on all ranks of the stage.
    tell: called with a decided trial.
    """

    def __init__(
        self,
        begun: Division,
        counts: MicroBatchCounts,
        shared: Callable[[float], float],
        tell: Callable[[Compared], None],
    ) -> None:
        self._begun, self._counts, self._shared, self._tell = begun, counts, shared, tell
        self._rows = begun.rows  # at the latest division
        self._several_ms: float | None = None  # time of the last lap, if it was the first of a pair
        self._stamps: dict[int, int] = {}  # when all micro-batches had a token, by text length
        self._timed: range | None = None  # text lengths before each timed token

    def first(self) -> Lap:
        """Returns the lap with the prompts, which always fill all stages."""
        begun = self._begun
        lap = self._lap(begun.rows, begun.prompt + 1)
        return Lap(begun.micro_batches, begun.prompt + 1 if lap.micro_batches < begun.micro_batches else lap.until)

    def next(self, rows: int, tokens: int) -> Lap:
        """Returns the next lap, for `rows` remaining rows with texts of `tokens` tokens."""
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
        """Notes that a micro-batch has its next token. Its texts have `tokens` tokens now."""
        if self._timed is not None:
            self._stamps[tokens] = perf_counter_ns()

    def several(self, rows: int) -> int:
        """Returns the number of micro-batches of the same size as at the beginning, but at least one for each stage."""
        begun = self._begun
        as_large = ceil_div(begun.micro_batches * rows, begun.rows)
        return min(rows, max(as_large, min(begun.stages, begun.micro_batches)))

    def pauses(self, sizes: Sequence[int], tokens: int) -> bool:
        """Tells whether all micro-batches pause to divide the rows anew: few rows are left in micro-batches of these
        `sizes`, and the new division would be different.
        """
        rows = sum(sizes)
        if not self._begun.again or self._timed is not None or not rows or rows * FEW > self._rows:
            return False
        count = self._best_count(rows, tokens)
        return count is None or len(sizes) > count or max(sizes) > ceil_div(rows, count)

    def _best_count(self, rows: int, tokens: int) -> int | None:
        """Returns the best number of micro-batches; None: a trial has to decide."""
        begun, several = self._begun, self.several(rows)
        if not begun.tries or several == 1:
            return several
        if (chosen := self._counts.chosen(rows, begun.prompt)) is not None:
            return 1 if chosen == 1 else several
        laps = 2 if self._several_ms is None else 1
        room = begun.longest is None or tokens + laps * (UNTIMED + TIMED) < begun.longest
        return None if room else several

    def _lap(self, rows: int, tokens: int) -> Lap:
        """Returns the lap that begins with texts of `tokens` tokens."""
        count = self._best_count(rows, tokens)
        if count is not None:
            return Lap(count, None)
        begin = tokens + UNTIMED
        self._timed, self._stamps = range(begin, begin + TIMED), {}
        return Lap(self.several(rows) if self._several_ms is None else 1, begin + TIMED)

    def _note(self, timed: range) -> None:
        """Notes the time of a token in a complete lap."""
        token_ms = self._shared(median(self._stamps[length + 1] - self._stamps[length] for length in timed) / 1e6)
        before, self._several_ms = self._several_ms, None
        if before is None:
            self._several_ms = token_ms
            return
        several = self.several(self._rows)
        trial = self._counts.trial(self._rows, self._begun.prompt, several).with_pair(before, token_ms)
        self._counts.note(trial)
        if trial.chosen is not None:
            self._tell(trial)
