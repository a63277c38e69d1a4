"""Resolution of a machine: the smallest difference between two sides that it tells apart in a given time.

It is measured with an engine against itself, in epochs with weights in new memory. The centres of these epochs scatter
around a ratio of 1, and their interval after a minute is the error that a comparison of other sides has as well. A
comparison of few epochs may estimate a smaller scatter by chance, so it claims no difference below the resolution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy  # loads scipy.stats on first use
from numpy.typing import ArrayLike

from labkit.statistics.ratios import CONFIDENCE
from labkit.statistics.sequential import interval_of
from labkit.statistics.trust import FEWEST_EPOCHS

MINUTE_S = 60.0  # of epochs, for which the resolution of a machine is quoted


@dataclass(frozen=True)
class TellsApart:
    """The smallest difference that a machine tells apart, and the time that it needs."""

    difference: float  # a fraction
    seconds: float

    def __str__(self) -> str:
        return f"{self.difference:.1%} apart in {self.seconds:.0f} s"

    @property
    def sentence(self) -> str:
        return f"this machine tells {self}, so smaller differences count as none"


@dataclass(frozen=True)
class Resolution:
    """Scatter of the ratio of an engine to itself on a machine."""

    scatter: float  # standard deviation of the logarithm of an epoch's ratio
    bias: float  # distance of its mean from 0; 0 where the interval of the mean holds 0
    epoch_s: float  # duration of an epoch, with the time to place the weights

    def after(self, seconds: float) -> TellsApart:
        """The smallest difference that `seconds` of epochs tell apart: half of Student's 95 % interval of the ratio. It
        is never smaller than the bias, which no number of epochs averages out.
        """
        epochs = max(FEWEST_EPOCHS, int(seconds / self.epoch_s))
        half = scipy.stats.t.isf((1 - CONFIDENCE) / 2, epochs - 1) * self.scatter / math.sqrt(epochs)
        return TellsApart(float(np.expm1(max(half, self.bias))), seconds)


def resolution_of(logs: ArrayLike, epoch_s: float) -> Resolution:
    """The resolution that an engine against itself shows. `logs`: of its ratio in at least two epochs of `epoch_s`
    seconds.
    """
    values = np.asarray(logs, dtype=float)
    _, low, high = interval_of(values, 1 - CONFIDENCE)
    bias = abs(float(values.mean())) if low > 0 or high < 0 else 0.0
    return Resolution(scatter=float(values.std(ddof=1)), bias=bias, epoch_s=epoch_s)
