"""Ratios of two sides that ran in the same rounds, or of one side at two times, with their interval, the noise they
stand against, and a verdict.

A round holds one run of each side, seconds apart, and its samples stay together: the bootstrap draws whole rounds. To
treat the tokens of a run as independent would make every interval too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

import numpy as np
import scipy  # loads scipy.stats when it is first asked for it

from labkit.system.errors import UserError

CONFIDENCE = 0.95
RESAMPLES = 4999
INDIFFERENCE = 0.01  # smaller differences are the same to a user, however quiet the machine is
LARGEST_SAME = 0.05  # where noise hides more than this, nothing can be called the same


class Verdict(StrEnum):
    """What a comparison may claim about its candidate."""

    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True)
class Ratio:
    """Baseline / candidate, above 1 where the candidate is faster, with its interval and the noise it stands against.

    `noise`: how far from 1 the ratio of a side to itself gets on this machine, as a fraction. `same`: how far from 1
    the whole interval may reach for the sides to be called the same; None: as far as the noise, and 5 % at most.
    """

    value: float
    low: float
    high: float
    noise: float
    same: float | None = None

    @property
    def verdict(self) -> Verdict:
        """FASTER or SLOWER when the whole interval lies beyond the noise; SAME when it lies within `same`.

        It follows from the interval alone. Whether the machine let the interval mean something is a question of
        `labkit.statistics.trust`, which the verdicts of records have passed.
        """
        if self.low > 1 + self.noise:
            return Verdict.FASTER
        if self.high < 1 / (1 + self.noise):
            return Verdict.SLOWER
        same = min(self.noise, LARGEST_SAME) if self.same is None else self.same
        if 1 / (1 + same) <= self.low and self.high <= 1 + same:
            return Verdict.SAME
        return Verdict.UNDECIDED

    def __str__(self) -> str:
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def ratio(baseline: Sequence[float], candidate: Sequence[float], *, seed: int = 0) -> Ratio:
    """Ratio of the medians of two sides that ran in the same rounds, `baseline[i]` beside `candidate[i]`.

    The 95 % interval comes from drawing whole rounds with replacement. ValueError below two rounds.
    """
    if len(baseline) != len(candidate) or len(baseline) < 2:
        raise UserError(
            f"got {len(baseline)} rounds of the baseline and {len(candidate)} of the candidate; "
            "an interval needs as many of each and at least 2"
        )
    low, high = _interval(baseline, candidate, CONFIDENCE, paired=True, seed=seed)
    return Ratio(
        value=float(np.median(baseline) / np.median(candidate)),
        low=low,
        high=high,
        noise=max(INDIFFERENCE, noise_floor(baseline), noise_floor(candidate)),
    )


def median_ratio(rounds: Sequence[float], *, seed: int = 0) -> Ratio:
    """The median of one side's rounds over itself, so 1, with its 95 % interval: how far the median may be off.

    The interval of fewer than two rounds reaches from nothing to infinity.
    """
    low, high, noise = 0.0, float("inf"), float("inf")
    if len(rounds) > 1:
        samples, middle = np.asarray(rounds, dtype=float), float(np.median(rounds))
        found = scipy.stats.bootstrap(
            (samples,),
            np.median,
            method="percentile",
            confidence_level=CONFIDENCE,
            n_resamples=RESAMPLES,
            random_state=np.random.default_rng(seed),
        ).confidence_interval
        low, high, noise = float(found.low) / middle, float(found.high) / middle, noise_floor(rounds)
    return Ratio(value=1.0, low=low, high=high, noise=noise)


def unpaired_ratio(
    before: Sequence[float], after: Sequence[float], *, tolerance: float, ratios: int = 1, seed: int = 0
) -> Ratio:
    """Ratio of the medians of one side at two times, before / after: above 1 where it became faster.

    Nothing pairs the rounds of two times, so they are drawn from each by itself. The intervals of so many `ratios` hold
    with 95 % all at once (Bonferroni); one of fewer than two rounds of either reaches from nothing to infinity.

    What lasts for as long as a process or a day does, no interval over rounds can know. So a change counts only beyond
    `tolerance`, a fraction, or beyond the noise of either time where that is more; within `tolerance` it is the same.
    """
    low, high = 0.0, float("inf")
    if min(len(before), len(after)) > 1:
        low, high = _interval(before, after, 1 - (1 - CONFIDENCE) / ratios, paired=False, seed=seed)
    noise = max(noise_floor(rounds) if len(rounds) > 1 else 0.0 for rounds in (before, after))
    value = float(np.median(before) / np.median(after))
    return Ratio(value=value, low=low, high=high, noise=max(tolerance, noise), same=tolerance)


def _interval(
    baseline: Sequence[float], candidate: Sequence[float], confidence: float, *, paired: bool, seed: int
) -> tuple[float, float]:
    found = scipy.stats.bootstrap(
        (np.asarray(baseline), np.asarray(candidate)),
        lambda a, b, axis: np.median(a, axis=axis) / np.median(b, axis=axis),
        paired=paired,
        vectorized=True,
        method="percentile",
        confidence_level=confidence,
        n_resamples=RESAMPLES,
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)


def noise_floor(rounds: Sequence[float]) -> float:
    """How far from 1 an A/A comparison made of one side's own rounds gets, as a fraction.

    Neighbouring rounds are taken as one round of A against A: of each pair either one may be the baseline. The floor
    is the 95th percentile of `|log(ratio of medians)|` over all such assignments. Neighbours share the state of the
    machine as the two sides of a round do, but they are further apart in time and half as many, so the floor is rather
    too wide than too narrow. Two rounds alone may agree by chance, so their distance counts double.
    """
    pairs = np.asarray(rounds[: len(rounds) // 2 * 2], dtype=float).reshape(-1, 2)
    if len(pairs) > 10:
        swaps = np.random.default_rng(0).integers(0, 2, (1024, len(pairs)))
    else:
        swaps = np.array(list(product((0, 1), repeat=len(pairs))))
    columns = np.arange(len(pairs))
    ratios = np.median(pairs[columns, swaps], axis=1) / np.median(pairs[columns, 1 - swaps], axis=1)
    distance = np.quantile(np.abs(np.log(ratios)), 0.95)
    return float(np.expm1(2 * distance if len(rounds) == 2 else distance))
