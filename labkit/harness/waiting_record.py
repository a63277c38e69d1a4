"""Record of one part of what people wait for: loading, attention over long contexts, prompts, the choice of tokens."""

from __future__ import annotations

from statistics import median
from typing import Literal

from labkit.harness.environment import Environment
from labkit.harness.frozen_record import ResultRecord
from labkit.statistics import Ratio, ratio


class WaitingTime(ResultRecord):
    """Samples of one part, by side or setting. Sides with equally many samples took turns, a sample each."""

    kind: Literal["waiting"] = "waiting"
    part: str  # such as "load"
    model: str
    origin: str  # of the weights
    dtype: str
    threads: int
    batch: int = 1
    tokens: int = 0  # of the prompt
    unit: str  # of the samples
    samples: dict[str, tuple[float, ...]]
    environment: Environment

    def median(self, name: str) -> float:
        return median(self.samples[name])

    def ratio(self, baseline: str, candidate: str) -> Ratio:
        """Samples of the baseline / samples of the candidate, with its interval over pairs."""
        return ratio(self.samples[baseline], self.samples[candidate])
