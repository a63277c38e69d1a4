"""Record of a side that was compared with itself: what a comparison says where there is nothing to find."""

from __future__ import annotations

import math
from typing import Literal, Self

import numpy as np

from labkit.harness.comparison import Comparison
from labkit.harness.environment import Environment
from labkit.harness.frozen_record import ResultRecord
from labkit.harness.runs import Case
from labkit.statistics import Ratio, Verdict
from labkit.statistics.sequential import EPOCHS, Rule, ratio_after, sequential_ratio


class SelfComparison(ResultRecord):
    """A comparison in epochs of a side with itself, or with the same side of another version.

    version: the other version of labkit, as the user named it; None: the same version.
    logs: logarithm of the ratio of each epoch.
    ends_s: seconds from the beginning of the first epoch to the last turn of each.
    looks: epochs after which the verdict was checked; empty: their number was fixed.
    rule: what decided; older records had no other one than EPOCHS.
    shares: of the limit of the memory that both sides reached; None: unknown.
    """

    kind: Literal["self_comparison"] = "self_comparison"
    case: Case
    side: str
    against: str  # label of the other side
    version: str | None = None
    environment: Environment
    logs: tuple[float, ...]
    ends_s: tuple[float, ...]
    looks: tuple[int, ...]
    rule: Rule = EPOCHS
    verdict: Verdict
    shares: tuple[float | None, float | None]

    @classmethod
    def of(cls, comparison: Comparison, *, version: str | None = None) -> Self:
        """The record of a comparison in epochs."""
        baseline, candidate = comparison.baseline, comparison.candidate
        return cls(
            case=comparison.case,
            side=candidate.name,
            against=baseline.name,
            version=version,
            environment=candidate.environment,
            logs=comparison.logs("per_token"),
            ends_s=tuple(max(turn.at_s for turn in run.turns) for run in candidate.runs),
            looks=comparison.looks,
            rule=comparison.rule,
            verdict=comparison.verdict,
            shares=(baseline.floor_share, candidate.floor_share),
        )

    @property
    def ratio(self) -> Ratio:
        """The ratio, with its interval at the last look."""
        return ratio_after(self.logs, len(self.looks), self.rule)

    def found_after_s(self, factor: float) -> float | None:
        """The seconds after which the rule would have said FASTER, or SLOWER for a `factor` below 1, if the baseline
        had taken `factor` times as long. The rule looks at these epochs with every ratio multiplied. None: it did not
        decide in them, or said the opposite.
        """
        logs = np.asarray(self.logs) + math.log(factor)
        right = Verdict.FASTER if factor > 1 else Verdict.SLOWER
        planned, look = self.rule.first_look, 1
        while True:
            epochs = min(planned, len(logs))
            said = sequential_ratio(logs[:epochs], look, self.rule).verdict
            if said in (Verdict.FASTER, Verdict.SLOWER) or epochs == len(logs):
                return self.ends_s[epochs - 1] if said is right else None
            planned, look = self.rule.next_look(planned), look + 1
