"""Whether a ratio is to be trusted: the grade that every headline, verdict and figure carries.

An interval tells how far the rounds of one run scatter. It knows nothing of a machine that was busy all the time, and
a figure that may be wrong by half is no figure to quote, whatever its verdict. So a ratio below one of these thresholds
keeps its place in tables but loses its verdict: it is UNDECIDED, with the reason and the remedy beside it.

The thresholds stand between what quiet and what busy machines gave: tests/statistics/test_trust.py holds them against
the reference results in profiles/ and against simulated machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.statistics.ratios import Ratio, Verdict
from labkit.system.asked_from import on_command_line, setting

FEWEST_ROUNDS = 6  # the range of n rounds holds the ratio with probability 1 - 2 * 0.5 ** n: 97 % of 6, 94 % of 5
WIDEST = 1.25  # upper end of the interval over its lower end: beyond, the figure may be off by an eighth either way
MOST_TAKEN = 0.1  # processors: a step that waits for one thread is slowed by a tenth where other programs take this
SHARE_ERROR, MOST_SHARE_ERROR = 0.10, 0.25  # how far past 100 % of the limit noise of the probes may lead

MORE_ROUNDS = "measure more rounds"
QUIET = "close other programs, or wait until they are done"
AGAIN = "close other programs, and capture again"
SETTINGS = {MORE_ROUNDS: ("rounds",), QUIET: ()}
OPTIONS = {MORE_ROUNDS: ("rounds", "budget_s"), QUIET: ("wait_quiet",)}


@dataclass(frozen=True)
class ShareOfLimit:
    """The share of the memory's limit that a side reached, and how far the probes beside a run differ, a fraction."""

    side: str
    share: float
    probe_noise: float = 0.0


@dataclass(frozen=True)
class Doubt:
    """One reason not to trust a ratio, and what may mend it."""

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
        """Whether more rounds, as they are, would take all doubts away."""
        return all(MORE_ROUNDS in doubt.remedies for doubt in self.doubts)

    @property
    def why(self) -> str:
        """All reasons in one line; empty for a trustworthy ratio."""
        return "; ".join(doubt.why for doubt in self.doubts)

    @property
    def remedies(self) -> tuple[str, ...]:
        """What to do about them, each thing once."""
        return tuple(dict.fromkeys(remedy for doubt in self.doubts for remedy in doubt.remedies))

    @property
    def remedy(self) -> str:
        """The same in one line."""
        return "; ".join(map(_told, self.remedies))

    @property
    def sentence(self) -> str:
        """The grade for a line of its own; empty for a trustworthy ratio."""
        return "" if self.trustworthy else f"not trustworthy: {self.why}. To mend it: {self.remedy}."

    @property
    def short(self) -> str:
        """The grade beside figures whose result says why it has it; empty for a trustworthy ratio."""
        return "" if self.trustworthy else "not trustworthy, for the reasons that stand with the result"

    def verdict(self, found: Verdict) -> Verdict:
        """`found`, or UNDECIDED where it is withheld."""
        return found if self.trustworthy else Verdict.UNDECIDED

    def graded(self, claim: str) -> str:
        """`claim` for a headline: as it is, or with the whole grade behind it."""
        return claim if self.trustworthy else f"{claim}; {self.sentence}"

    def explained(self, claim: str) -> str:
        """`claim`, which says itself that it is not trustworthy where it is not, with the reasons and the remedy."""
        return claim if self.trustworthy else f"{claim}. The reason: {self.why}. To mend it: {self.remedy}."


def _told(remedy: str) -> str:
    """With what can be given for it from where it is read: notebooks have a parameter for the rounds alone."""
    names = (OPTIONS if on_command_line() else SETTINGS).get(remedy, ())
    return f"{remedy} ({setting(*names)})" if names else remedy


def taken_cores(others: float, *, needed: int, cores: int) -> float:
    """How many of the `needed` processors are taken when other programs keep `others` of a machine's `cores` busy."""
    return max(0.0, min(others - max(0, cores - needed), float(needed)))


def busy(taken_cores: Sequence[float]) -> bool:
    """Whether other programs took more of the processors than a figure bears, in the median round."""
    return len(taken_cores) > 0 and float(np.median(taken_cores)) > MOST_TAKEN


def load_doubts(taken_cores: Sequence[float], remedy: str) -> list[Doubt]:
    """The doubt about a figure that other programs took processors from, if they took too many."""
    if not busy(taken_cores):
        return []
    taken = float(np.median(taken_cores))
    return [Doubt(f"other programs used {taken:.1f} of the processors that it was measured on", (remedy,))]


def grade(
    found: Ratio, rounds: int, *, taken_cores: Sequence[float] = (), shares: Iterable[ShareOfLimit] = ()
) -> Trust:
    """The grade of a ratio over so many rounds.

    `taken_cores`: by round, how many of the processors that a side needed other programs kept busy; empty where nobody
    looked. `shares`: of the limit, of the sides that it applies to.
    """
    doubts = []
    if rounds < FEWEST_ROUNDS:
        count = f"{rounds} {'round' if rounds == 1 else 'rounds'}"
        doubts.append(Doubt(f"{count}, fewer than {FEWEST_ROUNDS}", (MORE_ROUNDS,)))
    if rounds > 1 and not found.high <= WIDEST * found.low:
        doubts.append(Doubt(f"the interval [{found.low:.2f}, {found.high:.2f}] is wide", (MORE_ROUNDS, QUIET)))
    doubts += load_doubts(taken_cores, QUIET)
    for side in shares:
        if side.share > 1 + min(max(SHARE_ERROR, side.probe_noise), MOST_SHARE_ERROR):
            why = f"{side.side} is at {side.share:.0%} of a limit that nothing can pass: the probes were disturbed"
            doubts.append(Doubt(why, (QUIET,)))
    return Trust(tuple(doubts))
