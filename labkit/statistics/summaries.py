"""The distribution of raw samples of one kind, remarks for a reader of their median, and means of grouped values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # loads scipy.stats on first use
from numpy.typing import NDArray

from labkit.statistics.ratios import CONFIDENCE

# MAD: median distance of the samples from their median. 14.8 are ten standard deviations of a normal distribution.
OUTLIER_MADS = 14.8
OUTLIER_SAMPLES = 10  # outliers among fewer samples are not reported
P95_SAMPLES = 59  # the largest of this many samples is a 95 % bound on the 95th percentile: 0.95 ** 59 < 0.05
WIDE_SPREAD = 0.10


@dataclass(frozen=True)
class Summary:
    """The distribution of one kind of sample.

    `p95` estimates the 95th percentile and does not bound it. The largest sample is a 95 % bound for any distribution
    if there are at least `P95_SAMPLES` samples. With fewer samples `p95_text` says that there are too few.
    """

    n: int
    median: float
    mean: float
    std: float
    p95: float
    spread: float  # interquartile range / median
    outliers: int

    @property
    def enough_for_p95(self) -> bool:
        """Whether the largest sample is a 95 % bound on the 95th percentile."""
        return self.n >= P95_SAMPLES

    @property
    def p95_text(self) -> str:
        return f"{self.p95:.2f}" if self.enough_for_p95 else f"{self.p95:.2f} (n too small)"


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
    """Marks samples more than `OUTLIER_MADS` MADs from the median. They are reported, and figures keep them."""
    distance = np.abs(np.asarray(samples, dtype=float) - np.median(samples))
    return distance > OUTLIER_MADS * scipy.stats.median_abs_deviation(samples)


def remarks(name: str, samples: Sequence[float]) -> list[str]:
    """Warnings that a reader needs before trusting the median of these samples."""
    summary = summarise(samples)
    warnings = []
    if summary.spread > WIDE_SPREAD:
        warnings.append(f"{name}: interquartile range is {summary.spread:.0%} of the median; the machine is not quiet")
    if summary.outliers and summary.n >= OUTLIER_SAMPLES:
        warnings.append(
            f"{name}: {summary.outliers} of {summary.n} samples are outliers, more than {OUTLIER_MADS} MADs from the "
            "median, and kept"
        )
    return warnings


def first_is_slow(rounds: Sequence[float]) -> bool:
    """Whether the first round took over a quarter longer than the slowest other round: too little warm-up."""
    return len(rounds) > 2 and rounds[0] > 1.25 * max(rounds[1:])


def median_of(numbers: Iterable[float | None]) -> float | None:
    """The median of the numbers that are known; None without one."""
    known = [number for number in numbers if number is not None]
    return float(np.median(known)) if known else None


@dataclass(frozen=True)
class Mean:
    """A mean and its 95 % interval; `low` and `high` are None if there is only one group."""

    value: float
    low: float | None
    high: float | None

    def map(self, function: Callable[[float], float]) -> Mean:
        """The mean and interval after a monotonically increasing function."""
        ends = (None if end is None else float(function(end)) for end in (self.low, self.high))
        return Mean(float(function(self.value)), *ends)


def mean_of_groups(means: Sequence[float], sizes: Sequence[int]) -> Mean:
    """The mean over all members of groups with these means and sizes. Each group is one observation.

    The interval is Student's, from the spread of the groups' means, weighted by their sizes (Cochran, Sampling
    Techniques, 3rd edition, 6.3: the variance of a ratio estimate).
    """
    values, weights = np.asarray(means, dtype=float), np.asarray(sizes, dtype=float)
    mean = float(np.average(values, weights=weights))
    count = len(values)
    if count < 2:
        return Mean(mean, None, None)
    scattered = weights / weights.mean() * (values - mean)
    reach = float(
        scipy.stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * np.sqrt(np.sum(scattered**2) / (count - 1) / count)
    )
    return Mean(mean, mean - reach, mean + reach)
