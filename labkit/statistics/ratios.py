"""Ratios of two sides that ran in the same rounds, or of one side at two times, with an interval, the noise and a
verdict.

A round holds one run of each side, seconds apart. The bootstrap draws whole rounds, so that the samples of a round stay
together: treating the tokens of a run as independent would make every interval too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

import numpy as np
import scipy  # loads scipy.stats on first use

from labkit.system.errors import UserError

CONFIDENCE = 0.95
RESAMPLES = 4999
INDIFFERENCE = 0.01  # a user does not notice smaller differences, even on a quiet machine
LEAST_SHOWN, MOST_SHOWN = 0.01, 1000  # ends of an interval in words
LARGEST_SAME = 0.05  # if noise hides larger differences, SAME is never claimed


class Verdict(StrEnum):
    """The claim of a comparison about its candidate."""

    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True)
class Ratio:
    """Time of the baseline / time of the candidate, above 1 if the candidate is faster, with its interval."""

    value: float
    low: float  # lower end of the interval
    high: float  # upper end of the interval
    noise: float  # FASTER and SLOWER need an interval beyond it, a fraction: a side and itself may differ by this much
    same: float | None = None  # SAME: the whole interval is this close to 1; None: the noise, 5 % at most

    @property
    def verdict(self) -> Verdict:
        """FASTER or SLOWER if the whole interval lies beyond the noise; SAME if it lies within `same`.

        It follows from the interval alone. Whether the interval can be trusted on this machine is decided by
        `labkit.statistics.trust`; verdicts in records have passed that test.
        """
        if self.low > 1 + self.noise:
            return Verdict.FASTER
        if self.high < 1 / (1 + self.noise):
            return Verdict.SLOWER
        same = min(self.noise, LARGEST_SAME) if self.same is None else self.same
        if 1 / (1 + same) <= self.low and self.high <= 1 + same:
            return Verdict.SAME
        return Verdict.UNDECIDED

    def is_narrow(self, precision: float) -> bool:
        """Whether the upper end of the interval is at most this fraction above its lower end."""
        return self.high <= self.low * (1 + precision)

    @property
    def interval(self) -> str:
        """Both ends, with two digits after the point. An interval that says next to nothing may have an end of 10^8."""
        low = f"{self.low:.2f}" if self.low >= LEAST_SHOWN else f"<{LEAST_SHOWN}"
        high = f"{self.high:.2f}" if self.high <= MOST_SHOWN else f">{MOST_SHOWN}"
        return f"[{low}, {high}]"

    def __str__(self) -> str:
        return f"{self.value:.2f}x {self.interval}"


def ratio(baseline: Sequence[float], candidate: Sequence[float], *, seed: int = 0) -> Ratio:
    """Ratio of the medians of two sides; `baseline[i]` and `candidate[i]` ran in the same round.

    The 95 % interval comes from drawing whole rounds with replacement. ValueError for fewer than two rounds.
    """
    if len(baseline) != len(candidate) or len(baseline) < 2:
        raise UserError(
            f"got {len(baseline)} rounds of the baseline and {len(candidate)} of the candidate; "
            "an interval needs the same number of each, at least 2"
        )
    low, high = _interval(baseline, candidate, CONFIDENCE, paired=True, seed=seed)
    return Ratio(
        value=float(np.median(baseline) / np.median(candidate)),
        low=low,
        high=high,
        noise=max(INDIFFERENCE, noise_floor(baseline), noise_floor(candidate)),
    )


def median_ratio(rounds: Sequence[float], *, seed: int = 0) -> Ratio:
    """The ratio 1 with the relative 95 % interval of the median of one side's rounds.

    With fewer than two rounds the interval is 0 to infinity.
    """
    low, high, noise = 0.0, float("inf"), float("inf")
    if len(rounds) > 1:
        samples, middle = np.asarray(rounds, dtype=float), float(np.median(rounds))
        interval = scipy.stats.bootstrap(
            (samples,),
            np.median,
            method="percentile",
            confidence_level=CONFIDENCE,
            n_resamples=RESAMPLES,
            random_state=np.random.default_rng(seed),
        ).confidence_interval
        low, high, noise = float(interval.low) / middle, float(interval.high) / middle, noise_floor(rounds)
    return Ratio(value=1.0, low=low, high=high, noise=noise)


def unpaired_ratio(
    before: Sequence[float],
    after: Sequence[float],
    *,
    tolerance: float,
    luck: float = 0.0,
    ratios: int = 1,
    seed: int = 0,
) -> Ratio:
    """Ratio of the medians of one side at two times, before / after: above 1 if it became faster.

    The rounds of two times are not paired, so the bootstrap draws them independently. `ratios`: the number of intervals
    that hold together with 95 % (Bonferroni). With fewer than two rounds at either time the interval is 0 to infinity.

    An interval over rounds cannot see an effect that lasts as long as a process or a day. So a change counts only if it
    exceeds `tolerance`, a fraction, and the noise at both times; a change within `tolerance` is SAME. `luck`: by how
    much two processes of the side may differ, a fraction. Rounds do not show it, so it is added to their noise.
    """
    low, high = 0.0, float("inf")
    if min(len(before), len(after)) > 1:
        low, high = _interval(before, after, 1 - (1 - CONFIDENCE) / ratios, paired=False, seed=seed)
    noise = max(noise_floor(rounds) if len(rounds) > 1 else 0.0 for rounds in (before, after))
    value = float(np.median(before) / np.median(after))
    return Ratio(value=value, low=low, high=high, noise=max(tolerance, noise + luck), same=tolerance)


def _interval(
    baseline: Sequence[float], candidate: Sequence[float], confidence: float, *, paired: bool, seed: int
) -> tuple[float, float]:
    interval = scipy.stats.bootstrap(
        (np.asarray(baseline), np.asarray(candidate)),
        lambda a, b, axis: np.median(a, axis=axis) / np.median(b, axis=axis),
        paired=paired,
        vectorized=True,
        method="percentile",
        confidence_level=confidence,
        n_resamples=RESAMPLES,
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def noise_floor(rounds: Sequence[float]) -> float:
    """How far from 1 an A/A comparison of one side's own rounds gets, a fraction. Needs at least two rounds.

    Two neighbouring rounds serve as one round of A against A; either one may be the baseline. The floor is the 95th
    percentile of `|log(ratio of medians)|` over all such assignments. Neighbours share the state of the machine like
    the two sides of a round, but they are further apart in time and half as many, so the floor is too wide rather than
    too narrow. With only two rounds, which may agree by chance, the distance counts double.
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
