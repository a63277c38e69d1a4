"""The ratio of two sides as it follows the rate of the memory.

A side that reaches a share s of the memory's limit cannot become more than 1 / s times as fast. Slow memory raises the
shares of both sides, so the ratio comes closer to 1. The rate changes within seconds on a shared machine, and one ratio
for all times is a mixture of ratios for slow and for fast memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # loads scipy.stats on first use
from numpy.typing import NDArray

FEWEST_PAIRS = 30
RATES_APART = 1.25  # ninth decile of the rates / first decile; below, memory had one rate
LEAST_CHANGE = 0.03  # of the ratio, a fraction
MOST_CHANCE = 0.001  # of such a rank correlation without any dependence


@dataclass(frozen=True)
class RatioByRate:
    """The ratio at the slow and at the fast end of the rates that were probed in the pairs."""

    slow_gb_s: float
    slow_ratio: float
    fast_gb_s: float
    fast_ratio: float

    def __str__(self) -> str:
        slow, fast = f"{self.slow_ratio:.2f}x at {self.slow_gb_s:.0f} GB/s", f"{self.fast_ratio:.2f}x"
        return f"{slow}, {fast} at {self.fast_gb_s:.0f} GB/s"


def follows_rate(rates_gb_s: Sequence[float], logs: Sequence[float]) -> bool | None:
    """Whether the logarithm of a time or ratio follows the rate of the memory. None: the samples do not show it."""
    rates, values = np.asarray(rates_gb_s, dtype=float), np.asarray(logs, dtype=float)
    if len(rates) < FEWEST_PAIRS or np.quantile(rates, 0.9) < RATES_APART * np.quantile(rates, 0.1):
        return None
    by_chance = scipy.stats.spearmanr(rates, values).pvalue > MOST_CHANCE
    slow, fast = _ends(rates)
    changes = abs(np.median(values[fast]) - np.median(values[slow])) >= np.log1p(LEAST_CHANGE)
    return None if changes and by_chance else bool(changes)


def ratio_by_rate(rates_gb_s: Sequence[float], logs: Sequence[float]) -> RatioByRate | None:
    """How the ratio of pairs follows the rate of the memory; None where it does not, or where there is one rate.

    rates_gb_s: probed beside each pair. logs: of each pair's ratio. The ends are the medians of the slowest and of the
    fastest quarter of the pairs.
    """
    rates, ratios = np.asarray(rates_gb_s, dtype=float), np.asarray(logs, dtype=float)
    if not follows_rate(rates_gb_s, logs):
        return None
    slow, fast = _ends(rates)
    return RatioByRate(
        slow_gb_s=float(np.median(rates[slow])),
        slow_ratio=float(np.exp(np.median(ratios[slow]))),
        fast_gb_s=float(np.median(rates[fast])),
        fast_ratio=float(np.exp(np.median(ratios[fast]))),
    )


def _ends(rates: NDArray[np.float64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which pairs are the slowest quarter, and which the fastest."""
    return rates <= np.quantile(rates, 0.25), rates >= np.quantile(rates, 0.75)
