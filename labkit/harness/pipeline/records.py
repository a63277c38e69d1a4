"""Records of a pipeline's stages: the work of each stage over time, schedule by schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from labkit.harness.environment import Environment
from labkit.harness.frozen_record import FrozenRecord, ResultRecord
from labkit.harness.pipeline.formulas import bubble, prompt_bubble
from labkit.stages import Phase

WORK = ("compute", "sample")  # not part of the bubble: a stage's layers, and the choice of tokens
MS = 1e6  # nanoseconds


class StageSpan(FrozenRecord):
    """Work of a stage on a micro-batch. All stages share one clock, in milliseconds."""

    kind: Literal["compute", "wait", "send", "sample", "idle"]  # "idle": a step of rows that had ended
    phase: Phase
    stage: int
    micro_batch: int
    step: int  # of the micro-batch; 0 for its prompt
    begin_ms: float
    end_ms: float

    @property
    def ms(self) -> float:
        return self.end_ms - self.begin_ms


def bubble_of(spans: Sequence[StageSpan], stages: int, begin: float, end: float) -> float:
    """The idle share of the stages' time between two moments."""
    worked = sum(max(0.0, min(span.end_ms, end) - max(span.begin_ms, begin)) for span in spans if span.kind in WORK)
    return 1 - worked / (stages * (end - begin))


class PipelineCase(FrozenRecord):
    """A generation on stages, each one rank of `threads` threads."""

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
    """A generation with a schedule."""

    schedule: str
    micro_batches: int
    batch: int
    stages: int
    new_tokens: int
    prompt_pieces: int  # pieces of the prompts of all micro-batches
    wall_ms: float  # of the call, on the slowest rank
    spans: tuple[StageSpan, ...]  # of all stages; 0 ms is the beginning of the call

    @property
    def name(self) -> str:
        return self.schedule if self.schedule == "naive" else f"{self.schedule}, m = {self.micro_batches}"

    @property
    def tokens(self) -> int:
        """New tokens of each row in the generation phase: all tokens after the first."""
        return self.new_tokens - 1

    @property
    def prompt_ms(self) -> float:
        """Time from the call until all prompts had passed; the generation phase begins here."""
        work = (span for span in self.spans if span.phase is Phase.PREFILL and span.kind in WORK)
        return max((span.end_ms for span in work), default=0.0)

    @property
    def end_ms(self) -> float:
        """Time at which the last token was chosen."""
        return max(span.end_ms for span in self.spans if span.kind in WORK)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all rows in the generation phase."""
        return self.batch * self.tokens * 1e3 / (self.end_ms - self.prompt_ms)

    @property
    def bubble(self) -> float:
        """Measured bubble in the generation phase. It can be slightly less than the formula's, because some stages are
        already filled when the phase begins.
        """
        return bubble_of(self.spans, self.stages, self.prompt_ms, self.end_ms)

    @property
    def formula(self) -> float:
        """The formula's bubble for equal stages."""
        return bubble(self.schedule, self.stages, self.micro_batches, self.tokens)

    @property
    def points_over(self) -> float:
        """Percentage points by which the bubble exceeds the formula's."""
        return (self.bubble - self.formula) * 100

    @property
    def prompt_bubble(self) -> float:
        """Measured bubble until all prompts had passed."""
        begin = min(span.begin_ms for span in self.spans if span.kind in WORK)
        return bubble_of(self.spans, self.stages, begin, self.prompt_ms)

    @property
    def prompt_formula(self) -> float:
        return prompt_bubble(self.schedule, self.stages, self.prompt_pieces)

    @property
    def step_ms(self) -> tuple[float, ...]:
        """The mean time of each stage for a step of a micro-batch after its prompt, with the choice of tokens. With the
        mean a simulation has as much work as was measured.
        """
        begin = self.prompt_ms
        work = [span for span in self.spans if span.kind in WORK and span.step > 0 and span.begin_ms >= begin]
        return tuple(self._mean_ms([span for span in work if span.stage == stage]) for stage in range(self.stages))

    @staticmethod
    def _mean_ms(work: Sequence[StageSpan]) -> float:
        return sum(span.ms for span in work) / max(1, sum(span.kind == "compute" for span in work))


class WayPoint(FrozenRecord):
    """Rate of a way of sharing a model, at a batch."""

    way: str
    batch: int
    tokens_per_s: float  # of all rows after their first tokens: the median of the runs
    runs: tuple[float, ...] = Field(min_length=1)


class PipelineMeasurement(ResultRecord):
    """Generations with several schedules, which take turns in the same processes."""

    kind: Literal["pipeline"] = "pipeline"
    case: PipelineCase
    environment: Environment
    layers: tuple[int, ...]  # of each stage
    pinned: bool  # each rank had cores of its own
    others_cores: float | None = None  # processors that other programs kept busy
    runs: tuple[ScheduleRun, ...] = Field(min_length=1)  # of each setting the round with the median bubble
    bubbles: tuple[tuple[float, ...], ...]  # of all rounds, in the order of `runs`
    rates: tuple[tuple[float, ...], ...] = ()  # tokens per second of all rounds, as `bubbles`; empty in older records
    ways: tuple[WayPoint, ...] = ()  # the pipeline, and tensor parallelism on equally many ranks
    left_out: str = ""  # why tensor parallelism could not be measured
