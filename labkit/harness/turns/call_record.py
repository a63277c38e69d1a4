"""Record of calls that took turns: raw times of every round, with the ratios of sides and their trust on demand.

Rounds belong to epochs, between which the weights of all sides were put into new memory. Older records have rounds
alone, with weights that stayed in one place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.harness.environment import Environment
from labkit.harness.frozen_record import FrozenRecord
from labkit.harness.turns.pairs import EpochScatter, Logs, by_epoch, scatter_of
from labkit.statistics import Ratio, ShareOfLimit, Trust, Verdict, grade, ratio, taken_cores
from labkit.statistics.rates import RatioByRate, ratio_by_rate
from labkit.statistics.sequential import (
    ROUNDS,
    Rule,
    centre,
    confidence_after,
    more_rounds,
    more_rounds_text,
    ratio_after,
    rule_of_epochs,
)


class CallRecord(FrozenRecord):
    """Times of calls of several sides, which took turns."""

    environment: Environment
    rounds_us: dict[str, tuple[float, ...]]  # microseconds by side and round
    bandwidth_gb_s: tuple[float, ...] | None  # read bandwidth in each round
    others_cores: tuple[float, ...] | None = None  # processors that other programs kept busy, by epoch, else by round
    epochs: tuple[int, ...] = ()  # the epoch of each round, counted from 0; empty: rounds without epochs
    looks: tuple[int, ...] = ()  # epochs after which the verdict was checked; empty: their number was fixed
    placed_anew: bool = False  # whether each epoch had its weights in new memory
    interrupted: bool = False  # by the user, before the schedule was done

    @property
    def judged(self) -> tuple[str, str]:
        """The two sides whose ratio has the verdict: the baseline and the candidate."""
        raise NotImplementedError

    @property
    def gain(self) -> Ratio:
        """Ratio of the sides that are judged."""
        return self.ratio_of(*self.judged)

    @property
    def trust(self) -> Trust:
        """Whether to believe the gain."""
        raise NotImplementedError

    @property
    def verdict(self) -> Verdict:
        """Verdict on the gain; UNDECIDED also where it is not trustworthy."""
        return self.trust.verdict(self.gain.verdict)

    @property
    def unit(self) -> str:
        """The word for what `count` counts."""
        return "epoch" if self.epochs else "round"

    @property
    def count(self) -> int:
        """Number of epochs, or of rounds."""
        return self.epochs[-1] + 1 if self.epochs else len(next(iter(self.rounds_us.values())))

    @property
    def rule(self) -> Rule:
        """What decides the gain."""
        return rule_of_epochs(self.placed_anew) if self.epochs else ROUNDS

    @property
    def confidence(self) -> str:
        """Confidence of the ratios' intervals."""
        return confidence_after(len(self.looks), self.rule)

    @property
    def scatter(self) -> EpochScatter | None:
        """Scatter of the gain between placements and inside of an epoch; None without two epochs."""
        return scatter_of(self.pair_logs(*self.judged)) if self.epochs else None

    @property
    def by_rate(self) -> RatioByRate | None:
        """How the gain follows the rate of the memory; None where it does not, and in rounds without epochs."""
        if self.bandwidth_gb_s is None or not self.epochs:
            return None
        return ratio_by_rate(self.bandwidth_gb_s, np.concatenate(self.pair_logs(*self.judged)).tolist())

    @property
    def remarks(self) -> tuple[str, ...]:
        """Why the gain is not decided; empty where it is."""
        if not self.trust.trustworthy:
            return (self.trust.sentence,)
        if self.verdict is not Verdict.UNDECIDED or not self.epochs:
            return ()
        more = more_rounds_text(more_rounds(self.gain, self.count, self.rule), self.unit)
        return (f"undecided after {self.count} {self.unit}s: {more}",)

    @property
    def measured_line(self) -> str:
        """The number of epochs or rounds, and where the weights lay, in words."""
        line = f"{self.count} {self.unit}s"
        if self.epochs:
            places = "in new memory in each" if self.placed_anew else "in one place all the time"
            line += f" of about {len(self.epochs) / self.count:.0f} rounds, weights {places}"
        return f"{line}, interrupted" if self.interrupted else line

    @property
    def read_bandwidth_gb_s(self) -> float | None:
        return None if self.bandwidth_gb_s is None else float(np.median(self.bandwidth_gb_s))

    def samples_us(self, side: str) -> tuple[float, ...]:
        """Independent samples of a side: the median of each epoch, or each round."""
        return tuple(float(np.median(rounds)) for rounds in self.by_epoch(self.rounds_us[side]))

    def pair_logs(self, baseline: str, candidate: str) -> list[Logs]:
        """Logarithm of baseline / candidate of each round, by epoch."""
        ours, theirs = self.by_epoch(self.rounds_us[baseline]), self.by_epoch(self.rounds_us[candidate])
        return [np.log(np.asarray(a) / np.asarray(b)) for a, b in zip(ours, theirs, strict=True)]

    def ratio_of(self, baseline: str, candidate: str) -> Ratio:
        """Time of the baseline / time of the candidate. An epoch counts with the centre of its rounds' ratios."""
        if not self.epochs:
            return ratio(self.rounds_us[baseline], self.rounds_us[candidate])
        logs = [centre(of_epoch) for of_epoch in self.pair_logs(baseline, candidate)]
        return ratio_after(logs, len(self.looks), self.rule)

    def by_epoch(self, rounds: Sequence[float]) -> list[Logs]:
        """Figures of rounds, by epoch; without epochs each round is alone."""
        return by_epoch(rounds, self.epochs or range(len(rounds)))

    def trust_of(self, ratio: Ratio, share: float | None = None) -> Trust:
        """Whether to believe a ratio of two sides. `share`: the candidate's share of the limit."""
        shares = [] if share is None else [ShareOfLimit("the fused side", share)]
        return grade(ratio, self.count, taken_cores=self.taken_cores, shares=shares, unit=self.unit)

    @property
    def taken_cores(self) -> tuple[float, ...]:
        """Processors that the calls needed and other programs kept busy, by epoch, else by round."""
        needed, cores = self.environment.threads if self.environment.gpu is None else 1, self.environment.cores
        return tuple(taken_cores(others, needed=needed, cores=cores) for others in self.others_cores or ())
