"""Trust in a ratio: the grade that every headline, verdict and figure carries.

An interval shows how far the rounds of one run scatter. It cannot show that the machine was busy all the time, and a
figure that may be wrong by half must not be quoted, even with a verdict. So a ratio that fails one of these thresholds
stays in tables but loses its verdict: it is UNDECIDED, with the reason and the remedy.

The thresholds lie between the results of quiet and of busy machines: tests/statistics/test_trust.py checks them with
the reference results in profiles/ and with simulated machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.statistics.ratios import Ratio, Verdict
from labkit.system.asked_from import offered, on_command_line, setting

FEWEST_ROUNDS = 6  # the range of n rounds holds the ratio with probability 1 - 2 * 0.5 ** n: 97 % of 6, 94 % of 5
FEWEST_EPOCHS = 3  # Student's interval over two epochs is wider than any effect
WIDEST = 1.25  # upper end of the interval / lower end; above, the figure may be off by an eighth either way
MOST_TAKEN = 0.1  # processors of other programs: this many slow a step that waits for one thread by a tenth
SHARE_ERROR, MOST_SHARE_ERROR = 0.10, 0.25  # by how much noise of the probes may exceed 100 % of the limit

MORE_ROUNDS = "measure for longer"
QUIET = "close other programs, or wait until they are done"
AGAIN = "close other programs, and capture again"
SETTINGS = {MORE_ROUNDS: ("rounds",), QUIET: ()}
OPTIONS = {MORE_ROUNDS: ("rounds", "budget_s"), QUIET: ("wait_quiet",)}


@dataclass(frozen=True)
class ShareOfLimit:
    """The share of the memory's limit that a side reached."""

    side: str
    share: float  # a fraction
    probe_noise: float = 0.0  # how far the probes of the run differ, a fraction


@dataclass(frozen=True)
class Doubt:
    """One reason not to trust a ratio, and its remedies."""

    why: str
    remedies: tuple[str, ...]


@dataclass(frozen=True)
class Trust:
    """The grade of one ratio. Without doubts it is trustworthy."""

    doubts: tuple[Doubt, ...] = ()

    @property
    def trustworthy(self) -> bool:
        return not self.doubts

    @property
    def mended_by_rounds(self) -> bool:
        """Whether more rounds alone would remove all doubts."""
        return all(MORE_ROUNDS in doubt.remedies for doubt in self.doubts)

    @property
    def why(self) -> str:
        """All reasons in one line; empty for a trustworthy ratio."""
        return "; ".join(doubt.why for doubt in self.doubts)

    @property
    def remedies(self) -> tuple[str, ...]:
        """The remedies for all doubts, each once."""
        return tuple(dict.fromkeys(remedy for doubt in self.doubts for remedy in doubt.remedies))

    @property
    def remedy(self) -> str:
        """The remedies in one line."""
        return "; ".join(map(_with_setting, self.remedies))

    @property
    def sentence(self) -> str:
        """The grade for a line of its own; empty for a trustworthy ratio."""
        return "" if self.trustworthy else f"not trustworthy: {self.why}. To mend it: {self.remedy}."

    @property
    def short(self) -> str:
        """The grade for figures of a result that states the reasons itself; empty for a trustworthy ratio."""
        return "" if self.trustworthy else "not trustworthy, for the reasons that stand with the result"

    def verdict(self, claimed: Verdict) -> Verdict:
        """`claimed` for a trustworthy ratio, else UNDECIDED."""
        return claimed if self.trustworthy else Verdict.UNDECIDED

    def decides(self, ratio: Ratio) -> bool:
        """Whether a ratio of this grade has a verdict, and an interval that is narrow enough to quote."""
        return self.verdict(ratio.verdict) is not Verdict.UNDECIDED and ratio.is_narrow(WIDEST - 1)

    def graded(self, claim: str) -> str:
        """`claim` for a headline: unchanged for a trustworthy ratio, else followed by the whole grade."""
        return claim if self.trustworthy else f"{claim}; {self.sentence}"

    def explained(self, claim: str) -> str:
        """`claim` with the reasons and the remedy. The claim itself already says that it is not trustworthy."""
        return claim if self.trustworthy else f"{claim}. The reason: {self.why}. To mend it: {self.remedy}."


def _with_setting(remedy: str) -> str:
    """The remedy with its setting, if the running command or the notebook has one."""
    names = offered(*(OPTIONS if on_command_line() else SETTINGS).get(remedy, ()))
    return f"{remedy} ({setting(*names)})" if names else remedy


def taken_cores(others: float, *, needed: int, cores: int) -> float:
    """Number of the `needed` processors that are taken when other programs keep `others` of `cores` processors busy."""
    return max(0.0, min(others - max(0, cores - needed), float(needed)))


def busy(taken_cores: Sequence[float]) -> bool:
    """Whether other programs took more than MOST_TAKEN processors in the median round."""
    return len(taken_cores) > 0 and float(np.median(taken_cores)) > MOST_TAKEN


def load_doubts(taken_cores: Sequence[float], remedy: str) -> list[Doubt]:
    """The doubt about a figure, if other programs took too many processors during its measurement."""
    if not busy(taken_cores):
        return []
    taken = float(np.median(taken_cores))
    return [Doubt(f"other programs used {taken:.1f} of the processors that it was measured on", (remedy,))]


def grade(
    ratio: Ratio,
    rounds: int,
    *,
    taken_cores: Sequence[float] = (),
    shares: Iterable[ShareOfLimit] = (),
    unit: str = "round",
) -> Trust:
    """The grade of a ratio over `rounds` rounds, or epochs with the `unit` "epoch".

    `taken_cores`: by round, the number of the side's processors that other programs kept busy; empty if not observed.
    `shares`: of the limit, for the sides that have one.
    """
    doubts = []
    fewest = FEWEST_EPOCHS if unit == "epoch" else FEWEST_ROUNDS
    if rounds < fewest:
        count = f"{rounds} {unit if rounds == 1 else unit + 's'}"
        doubts.append(Doubt(f"{count}, fewer than {fewest}", (MORE_ROUNDS,)))
    # Rounds that are slow as a whole also move the interval, so it is no evidence; epochs with a verdict are.
    decided = unit == "epoch" and ratio.verdict is not Verdict.UNDECIDED
    if rounds > 1 and not ratio.high <= WIDEST * ratio.low and not decided:
        doubts.append(Doubt(f"the interval {ratio.interval} is wide", (MORE_ROUNDS, QUIET)))
    doubts += load_doubts(taken_cores, QUIET)
    for side in shares:
        if side.share > 1 + min(max(SHARE_ERROR, side.probe_noise), MOST_SHARE_ERROR):
            why = f"{side.side} is at {side.share:.0%} of a limit that nothing can pass: the probes were disturbed"
            doubts.append(Doubt(why, (QUIET,)))
    return Trust(tuple(doubts))
