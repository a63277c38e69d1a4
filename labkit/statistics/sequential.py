"""Rounds or epochs that are added until a comparison is decided, with an interval that holds at every look.

A test that checks a 95 % interval after every round, and stops when it excludes 1, sooner or later finds a difference
between a side and itself. So each look spends a share of one budget of error (alpha spending, after Lan and DeMets,
Biometrika 70, 1983, with a union bound instead of the joint distribution of the looks). The k-th look at rounds spends
`error / (k * (k + 1))`, which adds up to `error` at most over any number of looks. The first look at epochs is after
three of them, whose interval says little. So the first ten looks at epochs spend equal shares of 90 % of the error, and
later looks share the rest in the same way as looks at rounds.

A look uses the Hodges-Lehmann interval of the logarithm of a round's ratio, from Wilcoxon's signed ranks (Hollander,
Wolfe and Chicken, Nonparametric Statistical Methods, 3.4). For a side against itself it assumes only that the sign of a
round's logarithm is a fair coin. This holds by construction: the order of the sides in a round is random. Heavy tails,
drift, and states of the machine that last for many rounds change the width of the interval, not its error rate.

Ranks say nothing before about ten epochs. There a look uses Student's t, which also assumes that the centres of epochs
scatter like a normal distribution; tests/statistics simulates machines on which they do not.

Three epochs may agree by chance, or because they lie in one quiet stretch of a shared machine: gpt2 was 1.7, 1.7 and
1.8 % slower than itself. But the speed of a side depends on where its weights lie in memory, and each epoch puts them
into new memory. So the ratios of epochs must scatter, and measurements have shown by how much at least: LEAST_SCATTER.
The interval of a look is never narrower than that of epochs that scatter by this much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import scipy  # loads scipy.stats on first use
from numpy.typing import ArrayLike, NDArray

from labkit.statistics.ratios import CONFIDENCE, INDIFFERENCE, LARGEST_SAME, Ratio
from labkit.statistics.trust import FEWEST_EPOCHS, FEWEST_ROUNDS, WIDEST

GROWTH = 1.3  # number of rounds at a look / number at the previous look
EVEN_LOOKS, EVEN_SHARE = 10, 0.9  # ten looks come to 45 epochs
PROCESS_LUCK = 0.02  # two processes of one side may differ by this for their whole life: no round averages it out
# Standard deviation of the ratio over epochs with weights in new memory. gpt2: 1 % in float32, 2 to 3 % in bfloat16.
LEAST_SCATTER = 0.01
LASTING = 0.015  # two processes of one engine may differ by this for many epochs, although weights are in new memory
SAME_EPOCHS = 0.03  # smaller differences between sides with weights in new memory count as none
EXACT_RANKS = 60  # rounds; above, the normal approximation of the signed-rank statistic errs on the wide side
MANY_ROUNDS = 1000
NARROWEST = 1e-4  # smallest distance of an estimate to a verdict, a logarithm; no number of rounds shows a smaller one


@dataclass(frozen=True)
class Rule:
    """When a comparison is looked at, and what its interval has to show."""

    error: float  # of all looks together
    first_look: int  # number of rounds
    noise: float  # FASTER and SLOWER need an interval beyond this, a fraction
    same: float  # SAME needs one within this, a fraction
    fewest: int  # rounds; fewer are not trusted
    even_looks: int = 0  # the first looks, which share most of the error evenly
    least_scatter: float = 0.0  # standard deviation of a round's logarithm, at least; 0: not known

    def error_of(self, look: int) -> float:
        """The probability that the interval of this look, counted from 1, misses."""
        even = EVEN_SHARE * self.error if self.even_looks else 0.0
        later = look - self.even_looks
        return even / self.even_looks if later <= 0 else (self.error - even) / (later * (later + 1))

    def next_look(self, rounds: int) -> int:
        """The number of rounds at the next look."""
        return max(self.first_look, math.ceil(rounds * GROWTH))

    def with_floor(self, difference: float) -> Rule:
        """The rule on a machine that tells no smaller difference apart, a fraction: FASTER and SLOWER need an interval
        beyond it. SAME may then hide a difference as large as this one, but no larger one than LARGEST_SAME.
        """
        same = max(self.same, min(difference, LARGEST_SAME))
        return replace(self, noise=max(self.noise, difference), same=same)


# The range of 8 rounds is the first that holds the ratio with the confidence of the first look.
ROUNDS = Rule(error=0.02, first_look=8, noise=PROCESS_LUCK, same=LARGEST_SAME, fewest=FEWEST_ROUNDS)
EPOCHS = Rule(
    error=1 - CONFIDENCE,
    first_look=3,
    noise=LASTING,
    same=SAME_EPOCHS,
    fewest=FEWEST_EPOCHS,
    even_looks=EVEN_LOOKS,
    least_scatter=LEAST_SCATTER,
)
EPOCHS_SHARED = replace(EPOCHS, noise=INDIFFERENCE, least_scatter=0.0)  # both sides read the same pages
# For weights that cannot be placed anew.
EPOCHS_IN_PLACE = replace(EPOCHS, noise=PROCESS_LUCK, same=LARGEST_SAME, least_scatter=0.0)


def rule_of_epochs(placed_anew: bool) -> Rule:
    """The rule of epochs. `placed_anew`: whether each of them had its weights in new memory."""
    return EPOCHS if placed_anew else EPOCHS_IN_PLACE


def sequential_ratio(logs: ArrayLike, look: int, rule: Rule) -> Ratio:
    """Ratio of two sides at the `look`-th look at their rounds. The intervals of all looks hold together with the
    probability `1 - rule.error`.

    logs: of the ratio in each round, or of the typical ratio in each epoch. The value is the typical ratio: the median
    of the averages of all pairs of rounds.
    """
    return _ratio(interval_at(logs, look, rule), rule)


def planned_ratio(logs: ArrayLike, rule: Rule) -> Ratio:
    """Ratio of two sides over a number of epochs that was fixed beforehand, with its 95 % interval."""
    return _ratio(interval_of(logs, 1 - CONFIDENCE), rule)


def ratio_after(logs: ArrayLike, looks: int, rule: Rule) -> Ratio:
    """Ratio of two sides after this many looks; 0: their number of epochs was fixed beforehand."""
    return sequential_ratio(logs, looks, rule) if looks else planned_ratio(logs, rule)


def confidence_after(looks: int, rule: Rule) -> str:
    """Confidence of the interval of `ratio_after`, in words."""
    return f"{1 - rule.error:.0%} over {looks} look{'s' if looks > 1 else ''}" if looks else f"{CONFIDENCE:.0%}"


def typical_time(times: ArrayLike, rule: Rule) -> tuple[float, Ratio]:
    """Centre of the times of one side's epochs, whose number was fixed beforehand, and its 95 % interval relative to
    it: a ratio of 1.
    """
    centre = planned_ratio(np.log(times), rule)
    return centre.value, replace(centre, value=1.0, low=centre.low / centre.value, high=centre.high / centre.value)


Interval = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]  # estimate, lower end, upper end


def interval_of(samples: ArrayLike, error: float) -> Interval:
    """Estimate and interval of the centre of samples [..., n], which misses with probability `error`: by signed ranks,
    or by Student's t where n is too small for ranks. One sample has an infinite interval.
    """
    values = np.asarray(samples, dtype=float)
    count = values.shape[-1]
    middle, low, high = hodges_lehmann(values, error)
    if _left_out(count, error / 2) is not None or count < 2:
        return middle, low, high
    half = scipy.stats.t.isf(error / 2, count - 1) * values.std(axis=-1, ddof=1) / math.sqrt(count)
    mean = values.mean(axis=-1)
    return mean, mean - half, mean + half


def interval_at(samples: ArrayLike, look: int, rule: Rule) -> Interval:
    """Estimate and interval of the centre of samples [..., n] at the `look`-th look. The interval is at least as
    wide as that of samples with the least scatter of the rule.
    """
    error = rule.error_of(look)
    middle, low, high = interval_of(samples, error)
    half = scipy.stats.norm.isf(error / 2) * rule.least_scatter / math.sqrt(np.shape(samples)[-1])
    return middle, np.minimum(low, middle - half), np.maximum(high, middle + half)


def _ratio(interval: Interval, rule: Rule) -> Ratio:
    with np.errstate(over="ignore"):  # no sample, no bounds
        middle, low, high = (float(np.exp(end)) for end in interval)
    return Ratio(value=middle, low=low, high=high, noise=rule.noise, same=rule.same)


def centre(samples: ArrayLike) -> float:
    """The centre of samples [n]: the median of the averages of all pairs of them (Hodges and Lehmann, Annals of
    Mathematical Statistics 34, 1963). A few disturbed samples hardly move it, as they hardly move the median, and it
    scatters less.
    """
    return float(hodges_lehmann(samples, 1.0)[0])


def hodges_lehmann(samples: ArrayLike, error: float) -> Interval:
    """Estimate and interval of the centre of samples [..., n] that are symmetric about it.

    The interval misses with probability `error` at most, half of it at each end. It is infinite if n is too small.
    """
    values = np.asarray(samples, dtype=float)
    first, second = np.triu_indices(values.shape[-1])
    averages = np.sort((values[..., first] + values[..., second]) / 2, axis=-1)
    outside = _left_out(values.shape[-1], error / 2)
    if outside is None:
        infinite = np.full(averages.shape[:-1], np.inf)
        return np.median(averages, axis=-1), -infinite, infinite
    return np.median(averages, axis=-1), averages[..., outside], averages[..., -1 - outside]


def more_rounds(ratio: Ratio, rounds: int, rule: Rule) -> int | None:
    """Estimated further rounds until a verdict; None if `rounds` are too few for an estimate.

    The interval shrinks with the square root of the number of rounds, and is a little wider at a later look. A verdict
    needs an interval around the present value that lies outside the rule's noise or within its SAME, and that is narrow
    enough to be trusted.
    """
    if not 0 < ratio.low <= ratio.high < math.inf:
        return None
    half, distance = math.log(ratio.high / ratio.low) / 2, abs(math.log(ratio.value))
    needed = max(distance - math.log1p(rule.noise), math.log1p(rule.same) - distance, NARROWEST)
    later = scipy.stats.norm.isf(rule.error_of(4) / 2) / scipy.stats.norm.isf(rule.error_of(2) / 2)  # look 4 / look 2
    total = rounds * (later * half / min(needed, math.log(WIDEST) / 2)) ** 2
    return max(1, rule.fewest - rounds, math.ceil(total) - rounds)


def more_rounds_text(more: int | None, unit: str = "round") -> str:
    """The result of `more_rounds` in words. `unit`: "round" or "epoch"."""
    if more is None:
        return f"too few {unit}s to say how many more would decide it"
    if more > MANY_ROUNDS:
        return f"more than {MANY_ROUNDS:,} more {unit}s would be needed to decide it: the machine is too noisy for this"
    return f"about {more:,} more {unit if more == 1 else unit + 's'} would decide it"


@cache
def _left_out(rounds: int, error: float) -> int | None:
    """Number of averages of pairs to leave out at each end; None if even the outermost ones do not suffice."""
    if rounds > EXACT_RANKS:
        mean, deviation = rounds * (rounds + 1) / 4, math.sqrt(rounds * (rounds + 1) * (2 * rounds + 1) / 24)
        return int(mean - 0.5 - scipy.stats.norm.isf(error) * deviation)
    chances = np.ones(1)
    for rank in range(1, rounds + 1):
        longer = np.zeros(len(chances) + rank)
        longer[: len(chances)] += chances / 2
        longer[rank:] += chances / 2
        chances = longer
    count = int(np.searchsorted(np.cumsum(chances), error, side="right"))  # P(statistic < count) <= error
    return count - 1 if count else None
