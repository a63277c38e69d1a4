"""`change_of` compares two times of one side: in epochs at equal rates of the memory, or in rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from labkit.harness.diff.changes import Change
from labkit.harness.diff.timed import TimedSide
from labkit.statistics import INDIFFERENCE, Ratio, Trust, grade, noise_floor, unpaired_ratio
from labkit.statistics.sequential import PROCESS_LUCK
from labkit.statistics.trust import FEWEST_EPOCHS, FEWEST_ROUNDS, Doubt
from labkit.statistics.two_times import TimedEpoch, any_follows_rate, common_rates, range_words, two_times

AGAIN = "measure both again, one right after the other"
MOST_PROBES = 0.05, 0.95  # quantiles of the probes that a range of rates in words has


def change_of(
    before: TimedSide, after: TimedSide, *, tolerance: float, ratios: int, equal_rates: bool = True
) -> Change:
    """The change of one side between two times.

    ratios: the number of changes whose intervals hold together with 95 %. equal_rates: take only turns at rates of the
    memory that both times had, and doubt a ratio that other rates may explain.
    """
    if before.epochs or after.epochs:
        return _over_epochs(before, after, tolerance, ratios, equal_rates)
    ratio = unpaired_ratio(before.rounds, after.rounds, tolerance=tolerance, luck=PROCESS_LUCK, ratios=ratios)
    counts = len(before.rounds), len(after.rounds)
    change = Change(before, after, ratio, _grade(before, after, ratio, counts), (before.median, after.median))
    return _doubted_by_rates(change, before.bandwidth_gb_s, after.bandwidth_gb_s) if equal_rates else change


def _over_epochs(before: TimedSide, after: TimedSide, tolerance: float, ratios: int, equal_rates: bool) -> Change:
    """The change where at least one of the times has epochs. Rounds of the other one count as epochs of one turn."""
    sides, both = (before, after), tuple(_epochs(side) for side in (before, after))
    known = all(len(epochs) > 1 and epoch.rates_gb_s for epochs in both for epoch in epochs)
    restricted = equal_rates and known and any_follows_rate(*both)
    common = common_rates(*both) if restricted else None
    noise = max(tolerance, *(_noise(side) for side in sides))
    times = two_times(*both, noise=noise, same=tolerance, ratios=ratios, common=common)
    change = Change(
        before,
        after,
        times.ratio,
        _grade(before, after, times.ratio, times.epochs),
        (times.before, times.after),
        times.scatter,
        common,
    )
    if common is None and restricted:
        return _doubted(change, _no_common_rate(*both))
    if times.rates_gb_s is not None:
        return _doubted_by_rates(change, *times.rates_gb_s)
    return (
        change if known or not equal_rates else _doubted_by_rates(change, before.bandwidth_gb_s, after.bandwidth_gb_s)
    )


def _epochs(side: TimedSide) -> tuple[TimedEpoch, ...]:
    return side.epochs or tuple(TimedEpoch((took,)) for took in side.rounds)


def _noise(side: TimedSide) -> float:
    """How far from 1 the ratio of the side to itself gets, for reasons that no interval over its samples shows."""
    if side.epochs:
        return max(side.tells_apart, INDIFFERENCE if side.placed_anew else PROCESS_LUCK)
    return PROCESS_LUCK + (noise_floor(side.rounds) if len(side.rounds) > 1 else 0.0)


def _grade(before: TimedSide, after: TimedSide, ratio: Ratio, counts: tuple[int, int]) -> Trust:
    """The grade of the ratio. `counts`: the epochs or rounds of each time that it rests on."""
    sides = (before, after)
    fewest = [FEWEST_EPOCHS if side.epochs else FEWEST_ROUNDS for side in sides]
    weaker = min((0, 1), key=lambda time: counts[time] / fewest[time])
    most_taken = max((side.taken_cores for side in sides), key=lambda taken: sum(taken) / max(len(taken), 1))
    shares = [side.share for side in sides if side.share is not None]
    return grade(ratio, counts[weaker], taken_cores=most_taken, shares=shares, unit=sides[weaker].sample)


def _doubted(change: Change, reason: str) -> Change:
    return replace(change, trust=Trust((*change.trust.doubts, Doubt(reason, (AGAIN,)))))


def _doubted_by_rates(change: Change, before: float | None, after: float | None) -> Change:
    """The change, with a doubt where the read bandwidth of the two times may explain its verdict."""
    ratio = change.ratio
    if before is None or after is None or max(before, after) <= (1 + ratio.noise) * min(before, after):
        return change
    explained = after / before
    corrected = replace(ratio, value=ratio.value / explained, low=ratio.low / explained, high=ratio.high / explained)
    if corrected.verdict is ratio.verdict:
        return change
    near = "" if change.common is None else " around turns with equal probes"
    why = f"memory was read at {before:.0f} GB/s before and at {after:.0f} after{near}, which may explain it"
    return _doubted(change, why)


def _no_common_rate(before: Sequence[TimedEpoch], after: Sequence[TimedEpoch]) -> str:
    """Why the turns of two times cannot be compared."""
    (low, high), (later_low, later_high) = (
        np.quantile([rate for epoch in epochs for rate in epoch.rates_gb_s], MOST_PROBES) for epochs in (before, after)
    )
    apart = high < later_low or later_high < low
    lack = "no common rate" if apart else "too few turns at common rates"
    earlier, later = range_words(low, high), range_words(later_low, later_high)
    return f"memory was read at {earlier} GB/s before and {later} after: {lack}"
