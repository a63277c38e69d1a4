"""Rounds that are added until a comparison is decided, with an interval that holds however often it is looked at.

Who looks at a 95 % interval after every round and stops when it excludes 1 finds a difference between a side and
itself sooner or later. So each look gets a share of one budget of error, which all looks together never exceed:
`ERROR / (k * (k + 1))` for the k-th, which adds up to `ERROR` over any number of looks (alpha spending, after Lan and
DeMets, Biometrika 70, 1983, with a union bound instead of the joint distribution of the looks).

The interval of a look is that of Hodges and Lehmann for the logarithm of the ratio of a round, from Wilcoxon's signed
ranks (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, 3.4). All that it assumes of a side against
itself is that the sign of a round's logarithm is a fair coin, and that holds by construction: the order of the sides in
a round is drawn. Heavy tails, drift, and moods of the machine that last for many rounds change how wide the interval
is, not how often it is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import scipy  # loads scipy.stats when it is first asked for it
from numpy.typing import ArrayLike, NDArray

from labkit.statistics.ratios import LARGEST_SAME, Ratio
from labkit.statistics.trust import FEWEST_ROUNDS, WIDEST

ERROR = 0.02  # of all looks together
FIRST_LOOK = 8  # rounds: the fewest whose range holds the ratio with the first look's confidence
GROWTH = 1.3  # rounds at a look over those at the look before
PROCESS_LUCK = (
    0.02  # two processes of one side may differ by so much for as long as they live: no round averages it out
)
EXACT_RANKS = 60  # beyond so many rounds the normal approximation of the signed-rank statistic errs on the wide side
MANY_ROUNDS = 1000


def error_of(look: int) -> float:
    """The probability with which the interval of this look, counted from 1, may miss."""
    return ERROR / (look * (look + 1))


def next_look(rounds: int) -> int:
    """After how many rounds to look again."""
    return max(FIRST_LOOK, math.ceil(rounds * GROWTH))


def sequential_ratio(baseline: Sequence[float], candidate: Sequence[float], look: int) -> Ratio:
    """Ratio of two sides at the `look`-th look at their rounds; the intervals of all looks hold at once with 98 %.

    `value` is the typical ratio of a round, the middle of the averages of all pairs of rounds. A claim needs an
    interval beyond 2 %, and SAME one within 5 %.
    """
    logs = np.log(np.asarray(baseline, dtype=float) / np.asarray(candidate, dtype=float))
    middle, low, high = (float(np.exp(end)) for end in hodges_lehmann(logs, error_of(look)))
    return Ratio(value=middle, low=low, high=high, noise=PROCESS_LUCK, same=LARGEST_SAME)


def hodges_lehmann(
    samples: ArrayLike, error: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Estimate and interval of the centre of samples [..., n] that are symmetric about it.

    The interval misses with probability `error` at most, half of it at each end; it is infinite where n is too small.
    """
    values = np.asarray(samples, dtype=float)
    first, second = np.triu_indices(values.shape[-1])
    averages = np.sort((values[..., first] + values[..., second]) / 2, axis=-1)
    outside = _left_out(values.shape[-1], error / 2)
    if outside is None:
        infinite = np.full(averages.shape[:-1], np.inf)
        return np.median(averages, axis=-1), -infinite, infinite
    return np.median(averages, axis=-1), averages[..., outside], averages[..., -1 - outside]


def more_rounds(found: Ratio, rounds: int) -> int | None:
    """About how many rounds it would take in addition to decide; None where `rounds` say too little about it.

    The interval shrinks with the square root of the rounds, and is a little wider at a later look. It decides when it
    is so narrow that, around the value found, it lies on one side of `PROCESS_LUCK` or within `LARGEST_SAME`, and no
    wider than what is trusted. Fewer than `FEWEST_ROUNDS` are not trusted at all.
    """
    if not 0 < found.low <= found.high < math.inf:
        return None
    half, distance = math.log(found.high / found.low) / 2, abs(math.log(found.value))
    needed = max(distance - math.log1p(PROCESS_LUCK), math.log1p(LARGEST_SAME) - distance)
    later = scipy.stats.norm.isf(error_of(4) / 2) / scipy.stats.norm.isf(error_of(2) / 2)
    total = rounds * (later * half / min(needed, math.log(WIDEST) / 2)) ** 2
    return max(1, FEWEST_ROUNDS - rounds, math.ceil(total) - rounds)


def more_rounds_text(more: int | None) -> str:
    """What `more_rounds` found, for a message."""
    if more is None:
        return "too few rounds to say how many more would decide it"
    if more > MANY_ROUNDS:
        return f"more than {MANY_ROUNDS:,} more rounds would be needed to decide it: the machine is too noisy for this"
    return f"about {more:,} more {'round' if more == 1 else 'rounds'} would decide it"


@cache
def _left_out(rounds: int, error: float) -> int | None:
    """How many of the averages of pairs may be left out at each end; None where not even the outermost ones suffice."""
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
