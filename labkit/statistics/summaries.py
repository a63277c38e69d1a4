"""The distribution of raw samples of one kind, and remarks for a reader of their median."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # loads scipy.stats on first use
from numpy.typing import NDArray

OUTLIER_Z = 14.8  # |x - median| / MAD, about ten standard deviations of a normal distribution
OUTLIER_SAMPLES = 10  # outliers among fewer samples are not reported
P95_SAMPLES = 59  # smallest n with a distribution-free 95 % bound on the 95th percentile: 0.95 ** 59 < 0.05
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
    """Summary of at least one sample. `std` is the deviation of the sample itself (divisor n), as in the articles."""
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
    """Marks samples whose modified z, `|x - median| / MAD`, is above 14.8. They are reported, and figures keep them."""
    distance = np.abs(np.asarray(samples, dtype=float) - np.median(samples))
    return distance > OUTLIER_Z * scipy.stats.median_abs_deviation(samples)


def remarks(name: str, samples: Sequence[float]) -> list[str]:
    """Warnings that a reader needs before trusting the median of these samples."""
    summary = summarise(samples)
    warnings = []
    if summary.spread > WIDE_SPREAD:
        warnings.append(f"{name}: interquartile range is {summary.spread:.0%} of the median; the machine is not quiet")
    if summary.outliers and summary.n >= OUTLIER_SAMPLES:
        warnings.append(
            f"{name}: {summary.outliers} of {summary.n} samples are outliers (modified z > {OUTLIER_Z}), kept"
        )
    return warnings


def first_is_slow(rounds: Sequence[float]) -> bool:
    """Whether the first round took over a quarter longer than the slowest other round: too little warm-up."""
    return len(rounds) > 2 and rounds[0] > 1.25 * max(rounds[1:])


def median_of(numbers: Iterable[float | None]) -> float | None:
    """The median of the numbers that are known; None without one."""
    known = [number for number in numbers if number is not None]
    return float(np.median(known)) if known else None
