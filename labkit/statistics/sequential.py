"""Rounds that are added until a comparison is decided, with an interval that holds at every look.

A test that checks a 95 % interval after every round, and stops when it excludes 1, sooner or later finds a difference
between a side and itself. So each look spends a share of one budget of error: the k-th look spends
`ERROR / (k * (k + 1))`, which adds up to `ERROR` at most over any number of looks (alpha spending, after Lan and
DeMets, Biometrika 70, 1983, with a union bound instead of the joint distribution of the looks).

A look uses the Hodges-Lehmann interval of the logarithm of a round's ratio, from Wilcoxon's signed ranks (Hollander,
Wolfe and Chicken, Nonparametric Statistical Methods, 3.4). For a side against itself it assumes only that the sign of a
round's logarithm is a fair coin. This holds by construction: the order of the sides in a round is random. Heavy tails,
drift, and states of the machine that last for many rounds change the width of the interval, not its error rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import scipy  # loads scipy.stats on first use
from numpy.typing import ArrayLike, NDArray

from labkit.statistics.ratios import LARGEST_SAME, Ratio
from labkit.statistics.trust import FEWEST_ROUNDS, WIDEST

ERROR = 0.02  # of all looks together
FIRST_LOOK = 8  # rounds: the smallest number whose range holds the ratio with the first look's confidence
GROWTH = 1.3  # number of rounds at a look / number at the previous look
PROCESS_LUCK = 0.02  # two processes of one side may differ by this for their whole life: no round averages it out
EXACT_RANKS = 60  # rounds; above, the normal approximation of the signed-rank statistic errs on the wide side
MANY_ROUNDS = 1000


def error_of(look: int) -> float:
    """The probability that the interval of this look, counted from 1, misses."""
    return ERROR / (look * (look + 1))


def next_look(rounds: int) -> int:
    """The number of rounds at the next look."""
    return max(FIRST_LOOK, math.ceil(rounds * GROWTH))


def sequential_ratio(baseline: Sequence[float], candidate: Sequence[float], look: int) -> Ratio:
    """Ratio of two sides at the `look`-th look at their rounds; the intervals of all looks hold together with 98 %.

    `value` is the typical ratio of a round: the median of the averages of all pairs of rounds. FASTER and SLOWER need
    an interval beyond 2 %, SAME needs one within 5 %.
    """
    logs = np.log(np.asarray(baseline, dtype=float) / np.asarray(candidate, dtype=float))
    middle, low, high = (float(np.exp(end)) for end in hodges_lehmann(logs, error_of(look)))
    return Ratio(value=middle, low=low, high=high, noise=PROCESS_LUCK, same=LARGEST_SAME)


def hodges_lehmann(
    samples: ArrayLike, error: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
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


def more_rounds(ratio: Ratio, rounds: int) -> int | None:
    """Estimated further rounds until a verdict; None if `rounds` are too few for an estimate.

    The interval shrinks with the square root of the number of rounds, and is a little wider at a later look. A verdict
    needs an interval around the present value that lies outside `PROCESS_LUCK` or within `LARGEST_SAME`, and that is
    narrow enough to be trusted. Fewer than `FEWEST_ROUNDS` rounds are never trusted.
    """
    if not 0 < ratio.low <= ratio.high < math.inf:
        return None
    half, distance = math.log(ratio.high / ratio.low) / 2, abs(math.log(ratio.value))
    needed = max(distance - math.log1p(PROCESS_LUCK), math.log1p(LARGEST_SAME) - distance)
    later = scipy.stats.norm.isf(error_of(4) / 2) / scipy.stats.norm.isf(error_of(2) / 2)  # at look 4 / at look 2
    total = rounds * (later * half / min(needed, math.log(WIDEST) / 2)) ** 2
    return max(1, FEWEST_ROUNDS - rounds, math.ceil(total) - rounds)


def more_rounds_text(more: int | None) -> str:
    """The result of `more_rounds` in words."""
    if more is None:
        return "too few rounds to say how many more would decide it"
    if more > MANY_ROUNDS:
        return f"more than {MANY_ROUNDS:,} more rounds would be needed to decide it: the machine is too noisy for this"
    return f"about {more:,} more {'round' if more == 1 else 'rounds'} would decide it"


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
