"""One side at two times, each measured in epochs: before / after, at rates of the memory that both times had.

Each epoch has its weights in another place of the memory, so epochs are the unit of the interval. It is Welch's: the
variances of the two times may differ (Biometrika 34, 1947). A decode step follows the rate of the memory, which changes
on a shared machine. So turns are compared in bins of the probed rate, and the ratio is a mean over the bins that both
times fill.

Its variance is the jackknife's, which leaves out one epoch after another (Efron and Stein, Annals of Statistics 9,
1981); with one bin it is exactly the variance of a mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

import numpy as np
import scipy  # loads scipy.stats on first use
from numpy.typing import NDArray

from labkit.statistics.rates import follows_rate
from labkit.statistics.ratios import CONFIDENCE, Ratio

BIN = 0.10  # width of a bin of rates, a fraction
OFFSETS = 4  # positions of the bins that are tried
FEWEST_IN_BIN = 2  # epochs of each time: with one, the place of its weights would be all that a bin compares
LEAST_COMMON = 0.25  # share of the turns at common rates; less may be only the tails of two different rates
Array = NDArray[np.float64]


@dataclass(frozen=True)
class TimedEpoch:
    """Times of a side in one epoch, and the rate of the memory that was probed next to each; no rates: unknown."""

    times: tuple[float, ...]
    rates_gb_s: tuple[float, ...] = ()


Epochs = Sequence[TimedEpoch]


@dataclass(frozen=True)
class CommonRates:
    """Bins of the rate that both times fill."""

    offset: float  # of the bins, as a part of their width
    bins: tuple[int, ...]
    ranges_gb_s: tuple[tuple[float, float], ...]  # rates of the turns in them; neighbouring bins are one range
    used: float  # share of all turns

    def __str__(self) -> str:
        ranges = " and ".join(range_words(*ends) for ends in self.ranges_gb_s)
        return f"at {ranges} GB/s, {self.used:.0%} of the turns"

    def of(self, epoch: TimedEpoch) -> list[int]:
        """The bin of each turn."""
        return _bins(epoch, self.offset)


@dataclass(frozen=True)
class TwoTimes:
    """Comparison of a side at two times."""

    ratio: Ratio
    before: float  # typical times, whose quotient is the ratio
    after: float
    epochs: tuple[int, int]  # whose turns were compared
    scatter: tuple[float, float]  # standard deviation of an epoch's time before and after, fractions; nan: one epoch
    rates_gb_s: tuple[float, float] | None  # of the memory around the turns that were compared, before and after


def range_words(low_gb_s: float, high_gb_s: float) -> str:
    """A range of rates; slow ones have a decimal."""
    digits = 0 if low_gb_s >= 10 else 1
    return f"{low_gb_s:.{digits}f} to {high_gb_s:.{digits}f}"


def any_follows_rate(before: Epochs, after: Epochs) -> bool:
    """Whether the time of a step may follow the rate of the memory. False only if rates differed at one of the times
    without an effect.
    """
    known = [
        follows_rate(
            [rate for epoch in epochs for rate in epoch.rates_gb_s],
            np.log([took for epoch in epochs for took in epoch.times]).tolist(),
        )
        for epochs in (before, after)
    ]
    return True in known or False not in known


def common_rates(before: Epochs, after: Epochs) -> CommonRates | None:
    """The rates that both times had; None if these are too few for a comparison. Every turn needs a probed rate."""
    most, fewest, best = LEAST_COMMON, 0, None
    for offset in (step / OFFSETS for step in range(OFFSETS)):
        shares = [_bin_shares(epochs, offset) for epochs in (before, after)]
        filled = sorted(set(shares[0]) & set(shares[1]))
        common = round(sum(min(share[number] for share in shares) for number in filled), 6)
        if common > most or (best and common == most and len(filled) < fewest):
            most, fewest, best = common, len(filled), _common(before, after, offset, filled)
    return best


def two_times(
    before: Epochs, after: Epochs, *, noise: float, same: float, ratios: int = 1, common: CommonRates | None = None
) -> TwoTimes:
    """The ratio before / after with its interval over epochs.

    noise, same: as of `Ratio`. ratios: the number of intervals that hold together with 95 % (Bonferroni). common: only
    turns at these rates count; None: all turns. With one epoch at either time the interval is 0 to infinity.
    """
    times = [_Cells.of(epochs, common) for epochs in (before, after)]
    ours, theirs = _centres(*times)
    low, high = 0.0, math.inf
    if min(len(cells.values) for cells in times) > 1:
        reach = _reach(times[0], times[1], (1 - CONFIDENCE) / ratios)
        with np.errstate(over="ignore"):  # the reach may be so long that the upper end is infinite
            low, high = float(np.exp(ours - theirs - reach)), float(np.exp(ours - theirs + reach))
    rates = None
    if common is not None:
        weights = _shared(*(cells.weights.mean(axis=0)[None] for cells in times))[0].tolist()
        rates = _rate_nearby(before, common, weights), _rate_nearby(after, common, weights)
    return TwoTimes(
        ratio=Ratio(value=math.exp(ours - theirs), low=low, high=high, noise=noise, same=same),
        before=math.exp(ours),
        after=math.exp(theirs),
        epochs=(len(times[0].values), len(times[1].values)),
        scatter=(times[0].scatter, times[1].scatter),
        rates_gb_s=rates,
    )


@dataclass(frozen=True)
class _Cells:
    """Logarithms of one time by epoch and bin. Epochs without a turn in the bins are left out."""

    values: Array  # [epoch, bin] median of the turns, 0 without any
    weights: Array  # [epoch, bin] share of the epoch's turns

    @classmethod
    def of(cls, epochs: Epochs, common: CommonRates | None) -> _Cells:
        """Cells of the times in these bins; None: one bin with all turns."""
        bins = (0,) if common is None else common.bins
        values, weights = np.zeros((2, len(epochs), len(bins)))
        for row, epoch in enumerate(epochs):
            by_bin: dict[int, list[float]] = {}
            numbers = [0] * len(epoch.times) if common is None else common.of(epoch)
            for number, took in zip(numbers, epoch.times, strict=True):
                by_bin.setdefault(number, []).append(math.log(took))
            for column, number in enumerate(bins):
                if inside := by_bin.get(number):
                    values[row, column], weights[row, column] = median(inside), len(inside) / len(epoch.times)
        rows = weights.any(axis=1)
        return cls(values[rows], weights[rows])

    @property
    def scatter(self) -> float:
        """Standard deviation of the epochs about the mean of their bins."""
        if len(self.values) < 2:
            return math.nan
        means = (self.weights * self.values).sum(axis=0) / self.weights.sum(axis=0)
        return float(np.std(np.average(self.values - means, axis=1, weights=self.weights), ddof=1))


def _centres(before: _Cells, after: _Cells) -> tuple[float, float]:
    """The centre of each time, over bins that count with the smaller of the shares of their turns."""
    return tuple(float(centre[0]) for centre in _all_centres(*_sums(before), *_sums(after)))  # type: ignore[return-value]


def _sums(cells: _Cells) -> tuple[Array, Array]:
    """Means over epochs of the weights, and of the weighted values, [1, bin]."""
    return cells.weights.mean(axis=0)[None], (cells.weights * cells.values).mean(axis=0)[None]


def _all_centres(weights: Array, sums: Array, other_weights: Array, other_sums: Array) -> tuple[Array, Array]:
    """Centres of both times for each row of the weights, [row, bin]."""
    shared = _shared(weights, other_weights)
    return tuple(
        (shared * total / np.where(weight > 0, weight, 1)).sum(axis=1)
        for weight, total in ((weights, sums), (other_weights, other_sums))
    )  # type: ignore[return-value]


def _shared(weights: Array, other_weights: Array) -> Array:
    """The weight of each bin in the ratio, [row, bin]."""
    smaller = np.minimum(weights, other_weights)
    return np.asarray(smaller / smaller.sum(axis=1, keepdims=True))


def _reach(before: _Cells, after: _Cells, error: float) -> float:
    """Half the width of the interval of the difference, which misses with this probability."""
    variances = _variance(before, after), _variance(after, before)
    freedoms = [_freedom(cells) for cells in (before, after)]
    total = sum(variances)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(variance**2 / free for variance, free in zip(variances, freedoms, strict=True))
    return float(scipy.stats.t.isf(error / 2, freedom) * math.sqrt(total))


def _variance(cells: _Cells, others: _Cells) -> float:
    """Variance of the difference of both times' centres by the epochs of `cells`: jackknife."""
    count = len(cells.values)
    weights, sums = (
        (part.sum(axis=0) - part) / (count - 1) for part in (cells.weights, cells.weights * cells.values)
    )  # [epoch that is left out, bin]
    ours, theirs = _all_centres(weights, sums, *_sums(others))
    return float((count - 1) * np.var(ours - theirs))


def _freedom(cells: _Cells) -> float:
    """Degrees of freedom of the variance: one less than the number of epochs that count alike."""
    shares = cells.weights.sum(axis=1)
    return max(float(shares.sum() ** 2 / (shares**2).sum()) - 1, 0.5)


def _bins(epoch: TimedEpoch, offset: float) -> list[int]:
    width = math.log1p(BIN)
    return [math.floor(math.log(rate) / width + offset) for rate in epoch.rates_gb_s]


def _bin_shares(epochs: Epochs, offset: float) -> dict[int, float]:
    """Mean share of an epoch's turns in each bin that enough epochs have."""
    shares: dict[int, list[float]] = {}
    for epoch in epochs:
        for number, count in Counter(_bins(epoch, offset)).items():
            shares.setdefault(number, []).append(count / len(epoch.times))
    return {number: sum(part) / len(epochs) for number, part in shares.items() if len(part) >= FEWEST_IN_BIN}


def _common(before: Epochs, after: Epochs, offset: float, bins: Sequence[int]) -> CommonRates:
    numbers = np.concatenate([_bins(epoch, offset) for epoch in (*before, *after)])
    rates = np.concatenate([epoch.rates_gb_s for epoch in (*before, *after)])
    ranges = []
    for _, neighbours in groupby(enumerate(bins), lambda item: item[1] - item[0]):
        inside = rates[np.isin(numbers, [number for _, number in neighbours])]
        ranges.append((float(inside.min()), float(inside.max())))
    return CommonRates(offset, tuple(bins), tuple(ranges), float(np.isin(numbers, bins).mean()))


def _rate_nearby(epochs: Epochs, common: CommonRates, weights: Sequence[float]) -> float:
    """The rate of the memory around the turns in the bins: the mean, with these weights, of each bin's median.

    The median is over the probes just before and after the turns. The probe of a turn itself has put the turn into its
    bin. A probe that errs can put turns of two times into one bin although the memory had different rates, and the
    probes of these turns would then agree by their errors. The probes of other turns do not have this bias. An epoch
    of one turn has no other probe, and counts with its own.
    """
    nearby: dict[int, list[float]] = {number: [] for number in common.bins}
    for epoch in epochs:
        logs = [math.log(rate) for rate in epoch.rates_gb_s]
        for place, number in enumerate(common.of(epoch)):
            if number in nearby:
                nearby[number] += [*logs[max(place - 1, 0) : place], *logs[place + 1 : place + 2]] or [logs[place]]
    medians = [median(logs) for logs in nearby.values()]
    return math.exp(sum(weight * log for weight, log in zip(weights, medians, strict=True)))
