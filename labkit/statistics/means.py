"""The mean of grouped values, with an interval that treats each group as one observation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.statistics.ratios import CONFIDENCE


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
    """The mean over all members of groups with these means and sizes.

    The interval is Student's, from the spread of the groups' means, weighted by their sizes (Cochran, Sampling
    Techniques, 3rd edition, 6.3: the variance of a ratio estimate).
    """
    from scipy.stats import t  # slow to import, and not needed to read records

    values, weights = np.asarray(means, dtype=float), np.asarray(sizes, dtype=float)
    mean = float(np.average(values, weights=weights))
    count = len(values)
    if count < 2:
        return Mean(mean, None, None)
    scattered = weights / weights.mean() * (values - mean)
    reach = float(t.ppf((1 + CONFIDENCE) / 2, count - 1) * np.sqrt(np.sum(scattered**2) / (count - 1) / count))
    return Mean(mean, mean - reach, mean + reach)
