"""Confidence intervals over steps by a bootstrap of blocks: neighbouring steps are alike and are drawn together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from labkit.nsys.arrays import Floats
from labkit.statistics import CONFIDENCE, RESAMPLES


@dataclass(frozen=True)
class Resampled:
    """Estimates of some quantities, with resamples if each side has at least two steps."""

    estimate: Floats
    distribution: Floats  # the estimates of each resample: quantity x resample
    blocks: int  # of the side with fewer

    def interval(self, confidence: float = CONFIDENCE) -> tuple[Floats, Floats]:
        """Lower and upper ends; NaN without resamples.

        The percentiles of a bootstrap are too narrow for few blocks. They are stretched by Student's t over the normal
        distribution, and by sqrt(n / (n - 1)), the factor by which a sample's deviation is too small.
        """
        if not self.distribution.size:
            unknown = np.full_like(self.estimate, np.nan)
            return unknown, unknown
        tail = (1 - confidence) / 2
        stretch = stats.t.isf(tail, self.blocks - 1) / stats.norm.isf(tail) * (self.blocks / (self.blocks - 1)) ** 0.5
        low, high = np.quantile(self.distribution, (tail, 1 - tail), axis=1)
        return self.estimate + stretch * (low - self.estimate), self.estimate + stretch * (high - self.estimate)


def block_length(steps: int) -> int:
    """The cube root of the number of steps: 3 for 27, 4 for 64. It grows slowly enough to leave many blocks."""
    return max(1, int(np.cbrt(steps) + 1e-9))


def resampled(
    baseline: Floats, candidate: Floats, quantities: Callable[[Floats, Floats], Floats], *, seed: int = 0
) -> Resampled:
    """`quantities` of the mean rows of both sides, with bootstraps over blocks of neighbouring rows.

    baseline, candidate: a row per step, a column per feature. quantities: a function of two arrays (features x any
    number of means). The sides are drawn independently.
    """
    estimate = quantities(baseline.mean(axis=0), candidate.mean(axis=0))
    if min(len(baseline), len(candidate)) < 2:
        return Resampled(estimate, np.empty((len(estimate), 0)), 0)
    sides = _Blocks(baseline), _Blocks(candidate)
    drawn = stats.bootstrap(
        tuple(np.arange(side.count) for side in sides),
        lambda a, b, axis: quantities(sides[0].mean(a), sides[1].mean(b)),
        vectorized=True,
        method="percentile",
        n_resamples=RESAMPLES,
        batch=500,
        random_state=np.random.default_rng(seed),
    )
    return Resampled(estimate, drawn.bootstrap_distribution, min(side.count for side in sides))


class _Blocks:
    """Sums over blocks of neighbouring rows. The last block may be shorter, so means weight blocks by their rows."""

    def __init__(self, rows: Floats) -> None:
        first = np.arange(0, len(rows), block_length(len(rows)))
        self.count = len(first)
        self._sums = np.add.reduceat(rows, first, axis=0)
        self._lengths = np.diff(np.append(first, len(rows)))

    def mean(self, drawn: NDArray[np.int64]) -> Floats:
        """Mean rows of draws (draw x block numbers) as features x draws."""
        draws = np.atleast_2d(drawn)
        places = draws + self.count * np.arange(len(draws))[:, None]
        times = np.bincount(places.ravel(), minlength=self.count * len(draws)).reshape(len(draws), self.count)
        means = (times @ self._sums / (times @ self._lengths)[:, None]).T
        return means[:, 0] if drawn.ndim == 1 else means
