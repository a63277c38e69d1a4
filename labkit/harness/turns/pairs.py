"""Ratios of two sides that took turns: by pair of turns, and by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from labkit.harness.runs import Run
from labkit.statistics.rates import RatioByRate, ratio_by_rate
from labkit.statistics.sequential import centre
from labkit.system.result_table import frame_of

if TYPE_CHECKING:
    import pandas as pd

CENTRE_ERROR = 1.0233  # standard error of the centre / of a mean, for a normal distribution: sqrt(pi / 3)
DEVIATION = 1.4826  # standard deviation / median absolute deviation, for a normal distribution
Logs = NDArray[np.float64]
PAIR_COLUMNS = (
    *("epoch", "pair", "baseline_ms", "candidate_ms", "ratio", "bandwidth_gb_s"),
    *("baseline_place", "candidate_place", "baseline_at_s", "candidate_at_s"),
    *("baseline_first_step_ms", "candidate_first_step_ms"),
)


@dataclass(frozen=True)
class EpochScatter:
    """Scatter of a comparison in epochs, as standard deviations of a ratio, in fractions."""

    placements: float  # of the epochs' centres, each with weights in another place
    turns: float  # of an epoch's centre, as far as the scatter of its own pairs explains it

    def __str__(self) -> str:
        return f"between placements ± {self.placements:.1%}, inside of an epoch ± {self.turns:.1%}"


def by_epoch(figures: Sequence[float] | Logs, epochs: Sequence[int]) -> list[Logs]:
    """Figures of rounds, grouped by the epoch of each round."""
    return np.split(np.asarray(figures, dtype=float), np.flatnonzero(np.diff(epochs)) + 1)


def pair_logs(baseline: Sequence[Run], candidate: Sequence[Run], metric: str = "per_token") -> list[Logs]:
    """Logarithm of baseline / candidate of each pair of turns, or of each prompt ("ttft"), by epoch. Epochs without a
    prompt have no first token.
    """

    def times(run: Run) -> Logs:
        return np.array(run.prompts_ms if metric == "ttft" else [turn.step_ms for turn in run.turns])

    pairs = zip(baseline, candidate, strict=True)
    return [np.log(times(ours) / times(theirs)) for ours, theirs in pairs if metric != "ttft" or theirs.prompts_ms]


def pair_rates(runs: Sequence[Run]) -> list[float | None]:
    """Read bandwidth that was probed in each pair, in GB/s, from the runs of one side."""
    return [turn.bandwidth_gb_s for run in runs for turn in run.turns]


def pairs_frame(baseline: Sequence[Run], candidate: Sequence[Run]) -> pd.DataFrame:
    """A row for each pair of turns, with the columns `PAIR_COLUMNS`. It has no rows where whole generations were
    timed.
    """
    rows = [
        (
            *(of_candidate.round, theirs.pair, ours.step_ms, theirs.step_ms, ours.step_ms / theirs.step_ms),
            *(theirs.bandwidth_gb_s, ours.place, theirs.place, ours.at_s, theirs.at_s),
            *(ours.first_step_ms, theirs.first_step_ms),
        )
        for of_baseline, of_candidate in zip(baseline, candidate, strict=True)
        for ours, theirs in zip(of_baseline.turns, of_candidate.turns, strict=True)
    ]
    return frame_of(rows, PAIR_COLUMNS)


def scatter_of(logs: Sequence[Logs]) -> EpochScatter | None:
    """The scatter of pairs that are grouped by epoch; None with less than two epochs."""
    if len(logs) < 2:
        return None
    inside = [CENTRE_ERROR * _deviation(epoch) / np.sqrt(len(epoch)) for epoch in logs if len(epoch) > 1]
    between = float(np.std([centre(epoch) for epoch in logs], ddof=1))
    return EpochScatter(placements=between, turns=float(np.median(inside)) if inside else between)


def _deviation(logs: Logs) -> float:
    """The standard deviation of most pairs. Some pairs meet a disturbance that the centre of an epoch hardly sees."""
    return DEVIATION * float(np.median(np.abs(logs - np.median(logs))))


def by_rate_of(runs: Sequence[Run], logs: Sequence[Logs]) -> RatioByRate | None:
    """How the ratio of pairs follows the rate that was probed in each pair. `runs`: of one side."""
    known = [(rate, log) for rate, log in zip(pair_rates(runs), np.concatenate(logs), strict=True) if rate is not None]
    return ratio_by_rate([rate for rate, _ in known], [log for _, log in known])
