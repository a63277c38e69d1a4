"""From raw samples to figures that say how sure they are.

Samples that were taken together stay together: a round holds one run of each side, seconds apart, so rounds are the
blocks that the bootstrap draws. Treating the tokens of a run as independent would make every interval too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

import numpy as np
import scipy  # loads scipy.stats when it is first asked for it
from numpy.typing import NDArray

from labkit.system.errors import UserError

CONFIDENCE = 0.95
RESAMPLES = 4999
INDIFFERENCE = 0.01  # smaller differences are the same to a user, however quiet the machine is
LARGEST_SAME = 0.05  # where noise hides more than this, nothing can be called the same
OUTLIER_Z = 14.8  # |x - median| / MAD, about ten standard deviations of a normal distribution
OUTLIER_SAMPLES = 10  # the deviation of fewer says little
P95_SAMPLES = 59  # the fewest with a distribution-free 95 % bound on the 95th percentile: 0.95 ** 59 < 0.05
WIDE_SPREAD = 0.10


class Verdict(StrEnum):
    """What a comparison may claim about its candidate."""

    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True)
class Ratio:
    """Baseline / candidate, above 1 where the candidate is faster, with its interval and the noise it stands against.

    `noise`: how far from 1 the ratio of a side to itself gets on this machine, as a fraction.
    """

    value: float
    low: float
    high: float
    noise: float

    @property
    def verdict(self) -> Verdict:
        """FASTER or SLOWER when the whole interval lies beyond the noise; SAME when it lies within, and within 5 %."""
        if self.low > 1 + self.noise:
            return Verdict.FASTER
        if self.high < 1 / (1 + self.noise):
            return Verdict.SLOWER
        same = min(self.noise, LARGEST_SAME)
        if 1 / (1 + same) <= self.low and self.high <= 1 + same:
            return Verdict.SAME
        return Verdict.UNDECIDED

    def __str__(self) -> str:
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Summary:
    """The distribution of one kind of sample. `p95` bounds the 95th percentile only from `P95_SAMPLES` samples on."""

    n: int
    median: float
    mean: float
    std: float
    p95: float
    spread: float  # interquartile range / median
    outliers: int

    @property
    def p95_is_bound(self) -> bool:
        return self.n >= P95_SAMPLES

    @property
    def p95_text(self) -> str:
        return f"{self.p95:.2f}" if self.p95_is_bound else f"{self.p95:.2f} (n too small)"


def ratio(baseline: Sequence[float], candidate: Sequence[float], *, seed: int = 0) -> Ratio:
    """Ratio of the medians of two sides that ran in the same rounds, `baseline[i]` beside `candidate[i]`.

    The 95 % interval comes from drawing whole rounds with replacement. ValueError below two rounds.
    """
    if len(baseline) != len(candidate) or len(baseline) < 2:
        raise UserError(
            f"got {len(baseline)} rounds of the baseline and {len(candidate)} of the candidate; "
            "an interval needs as many of each and at least 2"
        )
    interval = scipy.stats.bootstrap(
        (np.asarray(baseline), np.asarray(candidate)),
        lambda a, b, axis: np.median(a, axis=axis) / np.median(b, axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return Ratio(
        value=float(np.median(baseline) / np.median(candidate)),
        low=float(interval.low),
        high=float(interval.high),
        noise=max(INDIFFERENCE, noise_floor(baseline), noise_floor(candidate)),
    )


def noise_floor(rounds: Sequence[float]) -> float:
    """How far from 1 an A/A comparison made of one side's own rounds gets, as a fraction.

    Neighbouring rounds are taken as one round of A against A: of each pair either one may be the baseline. Over all
    such assignments, the 95th percentile of |log(ratio of medians)|. Neighbours share the machine's mood as the two
    sides of a round do, but are further apart in time and half as many, so the floor errs on the wide side. Two rounds
    alone may agree by chance, so their distance counts double.
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


def outliers(samples: Sequence[float]) -> NDArray[np.bool_]:
    """Which samples have a modified z, |x - median| / MAD, above 14.8. They are reported and stay in every figure."""
    distance = np.abs(np.asarray(samples, dtype=float) - np.median(samples))
    return distance > OUTLIER_Z * scipy.stats.median_abs_deviation(samples)


def summarise(samples: Sequence[float]) -> Summary:
    """Summary of at least one sample; the standard deviation is that of the sample, as in the articles' protocol."""
    q1, median, q3, p95 = np.quantile(samples, (0.25, 0.5, 0.75, 0.95))
    return Summary(
        n=len(samples),
        median=float(median),
        mean=float(np.mean(samples)),
        std=float(np.std(samples)),
        p95=float(p95),
        spread=float((q3 - q1) / median),
        outliers=int(outliers(samples).sum()),
    )


def remarks(name: str, samples: Sequence[float]) -> list[str]:
    """What a reader must know about these samples before trusting their median."""
    summary = summarise(samples)
    found = []
    if summary.spread > WIDE_SPREAD:
        found.append(f"{name}: interquartile range is {summary.spread:.0%} of the median; the machine is not quiet")
    if summary.outliers and summary.n >= OUTLIER_SAMPLES:
        found.append(f"{name}: {summary.outliers} of {summary.n} samples are outliers (modified z > {OUTLIER_Z}), kept")
    return found


def first_is_slow(rounds: Sequence[float]) -> bool:
    """Whether the first round took a quarter longer than the slowest of the others: too little warm-up."""
    return len(rounds) > 2 and rounds[0] > 1.25 * max(rounds[1:])
