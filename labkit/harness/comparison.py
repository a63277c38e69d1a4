"""The record of two sides that were measured against each other, with what may be claimed of it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from labkit.harness.records import METRICS, SCHEMA_VERSION, Case, FrozenRecord, Measurement
from labkit.statistics import CONFIDENCE, Ratio, Trust, Verdict, grade, ratio
from labkit.statistics.sequential import ERROR, more_rounds, more_rounds_text, sequential_ratio
from labkit.statistics.trust import FEWEST_ROUNDS


class Comparison(FrozenRecord):
    """Two sides that ran the same case in the same rounds, each in its own process. Ratios are baseline / candidate.

    `looks`: where rounds were added until it was decided, after how many rounds it was looked at. Its ratios then are
    those of `labkit.statistics.sequential`, whose intervals hold for all looks at once.
    """

    kind: Literal["comparison"] = "comparison"
    schema_version: Literal[1] = SCHEMA_VERSION
    baseline: Measurement
    candidate: Measurement
    tokens_equal: bool  # over all sequences of all rounds, position by position
    first_difference: int | None  # the earliest new token that differs, from 0
    looks: tuple[int, ...] = ()

    @property
    def case(self) -> Case:
        return self.candidate.case

    @property
    def rounds(self) -> int:
        return len(self.candidate.runs)

    def ratio(self, metric: str) -> Ratio:
        """Baseline / candidate of "ttft", "per_token" or "end_to_end", with its interval over rounds."""
        baseline, candidate = self.baseline.rounds_ms(metric), self.candidate.rounds_ms(metric)
        return sequential_ratio(baseline, candidate, len(self.looks)) if self.looks else ratio(baseline, candidate)

    @property
    def confidence(self) -> str:
        """That of the ratios' intervals, for the head of a column."""
        return f"{1 - ERROR:.0%} over {len(self.looks)} looks" if self.looks else f"{CONFIDENCE:.0%}"

    def trust(self, metric: str = "per_token") -> Trust:
        """Whether the ratio of a metric is to be trusted, and if not, why and what to do."""
        sides = (self.baseline, self.candidate)
        shares = [share for side in sides if (share := side.share_of_limit) is not None]
        most = max((side.taken_cores for side in sides), key=sum)
        return grade(self.ratio(metric), self.rounds, taken_cores=most, shares=shares)

    @property
    def verdict(self) -> Verdict:
        """Of the time per token; UNDECIDED too where its ratio is not trustworthy."""
        return self.verdict_of("per_token")

    def verdict_of(self, metric: str) -> Verdict:
        """Of a metric, as for `verdict`."""
        return self.trust(metric).verdict(self.ratio(metric).verdict)

    def claim(self, metric: str = "per_token") -> str:
        """The ratio with its interval, and its verdict or that it is not trustworthy, in a few words."""
        trusted = self.trust(metric).trustworthy
        return f"{self.ratio(metric)} {self.verdict_of(metric) if trusted else 'NOT TRUSTWORTHY'}"

    @property
    def more_rounds(self) -> int | None:
        """About how many rounds it would take in addition to decide; None where it is decided, or cannot be told, or
        where rounds would not mend what makes it not trustworthy.
        """
        undecided = self.verdict is Verdict.UNDECIDED and self.trust().mended_by_rounds
        return more_rounds(self.ratio("per_token"), self.rounds) if undecided else None

    @property
    def read_bandwidth_gb_s(self) -> float | None:
        sides = (self.baseline.read_bandwidth_gb_s, self.candidate.read_bandwidth_gb_s)
        return None if None in sides else float(np.mean(sides))  # type: ignore[arg-type]

    @property
    def limit_ratio(self) -> float | None:
        """What the memory allows more ranks to gain: the candidate's read bandwidth over the baseline's, each probed
        with all threads of its side beside its run, median over rounds. 1.0 for sides of as many threads in all.
        """
        pairs = [
            (ours.bandwidth_gb_s, theirs.bandwidth_gb_s)
            for ours, theirs in zip(self.candidate.runs, self.baseline.runs, strict=True)
        ]
        found = [float(np.mean(ours) / np.mean(theirs)) for ours, theirs in pairs if ours and theirs]
        if self.candidate.case.cores == self.baseline.case.cores:
            return 1.0
        return float(np.median(found)) if found else None

    @property
    def remarks(self) -> tuple[str, ...]:
        """What weakens the comparison, both sides' remarks included."""
        found = [*self.baseline.remarks, *self.candidate.remarks]
        if self.rounds < FEWEST_ROUNDS:
            held = 1 - 2 * 0.5**self.rounds
            found.append(
                f"{self.rounds} rounds: the interval holds the ratio with {held:.0%} probability at most, not 95%"
            )
        environment = self.candidate.environment
        if not self.candidate.taken_cores and environment.load_average > environment.cores / 2:
            found.append(f"the machine was busy before the first round (load {environment.load_average})")
        if not self.tokens_equal:
            found.append(f"the sides' tokens differ from new token {self.first_difference} on")
        trust = self.trust()
        if not trust.trustworthy:
            found.append(trust.sentence)
        if self.verdict is Verdict.UNDECIDED and trust.mended_by_rounds:
            found.append(f"undecided after {self.rounds} rounds: {more_rounds_text(self.more_rounds)} (--budget-s)")
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """The one object that `labkit compare --json` prints last."""
        ratios = {metric: self.ratio(metric) for metric in METRICS}
        trust = self.trust()
        return {
            **self.case.model_dump(),
            "rounds": self.rounds,
            "looks": list(self.looks),
            "baseline": self.baseline.as_dict(),
            "candidate": self.candidate.as_dict(),
            **{f"{metric}_ratio": found.value for metric, found in ratios.items()},
            **{f"{metric}_ratio_low": found.low for metric, found in ratios.items()},
            **{f"{metric}_ratio_high": found.high for metric, found in ratios.items()},
            "noise": ratios["per_token"].noise,
            "verdict": str(self.verdict),
            "trustworthy": trust.trustworthy,
            "distrust": [doubt.why for doubt in trust.doubts],
            "remedy": trust.remedy,
            "more_rounds": self.more_rounds,
            "tokens_equal": self.tokens_equal,
            "first_difference": self.first_difference,
            "read_bandwidth_gb_s": self.read_bandwidth_gb_s,
            "limit_ratio": self.limit_ratio,
            "remarks": list(self.remarks),
            "environment": self.candidate.environment.model_dump(mode="json"),
        }
