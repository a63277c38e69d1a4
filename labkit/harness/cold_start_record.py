"""Record of cold starts: what people wait for from the command in a shell to the last token."""

from __future__ import annotations

from statistics import median
from typing import Literal

from labkit.harness.environment import Environment
from labkit.harness.frozen_record import ResultRecord
from labkit.statistics import Ratio, ratio

PHASES = ("import", "load", "prompt", "tokens")  # the parts of a cold start, in their order


class ColdStart(ResultRecord):
    """Processes that import their library, load a model, read a prompt and generate. In every round each side starts
    once for each length of the prompt, in random order. The files are in the page cache.

    runs_s: seconds of the PHASES of each round, by side and tokens of the prompt.
    """

    kind: Literal["cold_start"] = "cold_start"
    model: str
    origin: str  # of the weights
    dtype: str
    threads: int
    new_tokens: int
    environment: Environment
    runs_s: dict[str, dict[int, tuple[tuple[float, ...], ...]]]

    def phases_s(self, side: str, prompt: int) -> dict[str, float]:
        """Median seconds of each phase."""
        return dict(zip(PHASES, map(median, zip(*self.runs_s[side][prompt], strict=True)), strict=True))

    def whole_s(self, side: str, prompt: int) -> list[float]:
        """Seconds from the command to the last token, by round."""
        return [sum(phases) for phases in self.runs_s[side][prompt]]

    def ratio(self, baseline: str, candidate: str, prompt: int) -> Ratio:
        """Time of the baseline / time of the candidate, with its interval over rounds."""
        return ratio(self.whole_s(baseline, prompt), self.whole_s(candidate, prompt))
