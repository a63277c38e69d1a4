"""What was measured of the stages of a pipeline: who did what when, schedule by schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import Field

from labkit.harness.environment import Environment
from labkit.harness.pipeline.formulas import bubble, prompt_bubble
from labkit.harness.records import SCHEMA_VERSION, FrozenRecord
from labkit.stages import Phase

WORK = ("compute", "sample")  # what is no bubble: a stage's layers, and the choice of tokens
MS = 1e6  # nanoseconds


class StageSpan(FrozenRecord):
    """What a stage did with a micro-batch. step: of the micro-batch, 0 for its prompt. Milliseconds on one clock of all
    stages. kind "idle": a step of rows that had ended.
    """

    kind: Literal["compute", "wait", "send", "sample", "idle"]
    phase: Phase
    stage: int
    micro_batch: int
    step: int
    begin_ms: float
    end_ms: float

    @property
    def ms(self) -> float:
        return self.end_ms - self.begin_ms


def end_of_prompt(spans: Iterable[StageSpan]) -> float:
    """When all prompts were through."""
    return max((each.end_ms for each in spans if each.phase is Phase.PREFILL and each.kind in WORK), default=0.0)


def bubble_of(spans: Sequence[StageSpan], stages: int, begin: float, end: float) -> float:
    """The share of the stages' time between two moments in which they did no work."""
    worked = sum(max(0.0, min(each.end_ms, end) - max(each.begin_ms, begin)) for each in spans if each.kind in WORK)
    return 1 - worked / (stages * (end - begin))


class PipelineCase(FrozenRecord):
    """What is generated on how many stages, each of a rank of `threads` threads."""

    model: str
    origin: str = ""
    dtype: str
    stages: int = Field(ge=2)
    batch: int = Field(ge=1)
    prompt_tokens: int = Field(ge=1)
    new_tokens: int = Field(ge=2)
    threads: int = Field(ge=1)

    @property
    def title(self) -> str:
        """The case in a line."""
        return (
            f"{self.model}, {self.dtype}, {self.stages} stages, batch {self.batch}, {self.prompt_tokens} + "
            f"{self.new_tokens} tokens"
        )


class ScheduleRun(FrozenRecord):
    """A generation with a schedule. prompt_pieces: of the prompts of all micro-batches. spans: of all stages, from the
    beginning of the call on. wall_ms: of the call, on the slowest rank.
    """

    schedule: str
    micro_batches: int
    batch: int
    stages: int
    new_tokens: int
    prompt_pieces: int
    wall_ms: float
    spans: tuple[StageSpan, ...]

    @property
    def name(self) -> str:
        return self.schedule if self.schedule == "naive" else f"{self.schedule}, m = {self.micro_batches}"

    @property
    def tokens(self) -> int:
        """Of each row, behind the first one: what the generation phase makes."""
        return self.new_tokens - 1

    @property
    def prompt_ms(self) -> float:
        """From the call until all prompts were through: where the generation phase begins."""
        return end_of_prompt(self.spans)

    @property
    def end_ms(self) -> float:
        """When the last token was chosen."""
        return max(each.end_ms for each in self.spans if each.kind in WORK)

    @property
    def tokens_per_s(self) -> float:
        """Of all rows, in the generation phase."""
        return self.batch * self.tokens * 1e3 / (self.end_ms - self.prompt_ms)

    @property
    def bubble(self) -> float:
        """Measured, in the generation phase: stages that a schedule fills while prompts are under way are not empty at
        its beginning, so that a little less than the formula is possible.
        """
        return bubble_of(self.spans, self.stages, self.prompt_ms, self.end_ms)

    @property
    def formula(self) -> float:
        """The bubble that the formula gives equal stages."""
        return bubble(self.schedule, self.stages, self.micro_batches, self.tokens)

    @property
    def points_over(self) -> float:
        """Of 100, by which the bubble is larger than the formula's."""
        return (self.bubble - self.formula) * 100

    @property
    def prompt_bubble(self) -> float:
        """Measured, until all prompts were through."""
        begin = min(each.begin_ms for each in self.spans if each.kind in WORK)
        return bubble_of(self.spans, self.stages, begin, self.prompt_ms)

    @property
    def prompt_formula(self) -> float:
        return prompt_bubble(self.schedule, self.stages, self.prompt_pieces)

    @property
    def step_ms(self) -> tuple[float, ...]:
        """The time of each stage for a step of a micro-batch behind its prompt, with the choice of tokens: the mean, so
        that what simulation makes of it has the work that was measured.
        """
        begin = self.prompt_ms
        work = [each for each in self.spans if each.kind in WORK and each.step > 0 and each.begin_ms >= begin]
        return tuple(self._mean_ms([each for each in work if each.stage == stage]) for stage in range(self.stages))

    @staticmethod
    def _mean_ms(work: Sequence[StageSpan]) -> float:
        return sum(each.ms for each in work) / max(1, sum(each.kind == "compute" for each in work))


class WayPoint(FrozenRecord):
    """What a way to share a model gives at a batch: tokens per second of all rows behind their first tokens, the median
    of the runs.
    """

    way: str
    batch: int
    tokens_per_s: float
    runs: tuple[float, ...] = Field(min_length=1)


class PipelineMeasurement(FrozenRecord):
    """Generations with several schedules in turns, in the same processes. runs: of each schedule the round with the
    median bubble; bubbles: of all rounds, in the order of `runs`. ways: the pipeline beside tensor parallelism on as
    many ranks; left_out: why that could not be measured. pinned: each rank had cores of its own. others_cores: that
    other programs kept busy. rates: tokens per second of all rounds, in the order of
    `runs`; empty in older records.
    """

    kind: Literal["pipeline"] = "pipeline"
    schema_version: Literal[1] = SCHEMA_VERSION
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
    case: PipelineCase
    environment: Environment
    layers: tuple[int, ...]
    pinned: bool
    others_cores: float | None = None
    runs: tuple[ScheduleRun, ...] = Field(min_length=1)
    bubbles: tuple[tuple[float, ...], ...]
    rates: tuple[tuple[float, ...], ...] = ()
    ways: tuple[WayPoint, ...] = ()
    left_out: str = ""
