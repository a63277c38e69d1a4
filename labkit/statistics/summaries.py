"""The distribution of raw samples of one kind, and what a reader must know before trusting their median."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # loads scipy.stats when it is first asked for it
from numpy.typing import NDArray

OUTLIER_Z = 14.8  # |x - median| / MAD, about ten standard deviations of a normal distribution
OUTLIER_SAMPLES = 10  # the deviation of fewer says little
P95_SAMPLES = 59  # the fewest with a distribution-free 95 % bound on the 95th percentile: 0.95 ** 59 < 0.05
WIDE_SPREAD = 0.10


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


def outliers(samples: Sequence[float]) -> NDArray[np.bool_]:
    """Which samples have a modified z, `|x - median| / MAD`, above 14.8. They are reported and stay in every figure."""
    distance = np.abs(np.asarray(samples, dtype=float) - np.median(samples))
    return distance > OUTLIER_Z * scipy.stats.median_abs_deviation(samples)


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
