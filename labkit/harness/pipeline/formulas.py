"""What a schedule costs a pipeline of equal stages, by formula.

P stages, m micro-batches, G tokens of each row behind the first, t the time of a stage for one micro-batch. Handing
over costs nothing. The bubble is the share of P times the wall time in which stages do nothing: each works G m t.

- barrier: every token is a pipeline of its own that fills and drains, like a batch of GPipe (Huang et al., 2019,
  section 2.3): the first micro-batch has passed after P t, the others follow t apart. G (m + P - 1) t.
- queue, of DeepSpeed Inference (Aminabadi et al., SC22, section IV): a micro-batch is round after P t. With m >= P the
  first stage never waits, and the last ends P - 1 stage times behind it: (G m + P - 1) t. With m < P a token takes P t,
  and the last micro-batch is m - 1 stage times behind the first: (G P + m - 1) t.
- rounds: the same, where all micro-batches have as many tokens.
- naive: one micro-batch of all rows: G P t.

A stage of W / P bytes of weights takes t(r) = max(W / (P BW), c r) for r rows: it reads its weights at the rate BW, and
multiplies the rows by them. So at one batch b, the queue of P micro-batches is t(b) / t(b / P) times faster than naive:
P times where computing is the limit, and not at all where reading weights is.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.system.errors import UserError

SCHEDULES = ("queue", "rounds", "barrier", "naive")


def stage_times(schedule: str, stages: int, micro_batches: int, tokens: int) -> int:
    """How many stage times the schedule takes from the first token behind the prompt to the last.

    naive: has one micro-batch, so these are times for all rows. UserError for numbers below 1, and for naive with more.
    """
    _check(schedule, stages=stages, micro_batches=micro_batches, tokens=tokens)
    if schedule == "barrier":
        return tokens * (micro_batches + stages - 1)
    return tokens * max(micro_batches, stages) + min(micro_batches, stages) - 1


def bubble(schedule: str, stages: int, micro_batches: int, tokens: int) -> float:
    """The share of the stages' time in which they do nothing, from 0 to 1. UserError as for `stage_times`."""
    return 1 - tokens * micro_batches / stage_times(schedule, stages, micro_batches, tokens)


def prompt_bubble(schedule: str, stages: int, pieces: int) -> float:
    """The same of the prompt. pieces: of all micro-batches, which pass through the stages one after the other, where n
    pieces take (n + P - 1) T / n in all, T for a stage; a micro-batch has several where its prompt has more rows than a
    step. With naive, a stage passes nothing on before it has all pieces.
    """
    _check(schedule, stages=stages, pieces=pieces)
    return 1 - 1 / stages if schedule == "naive" else (stages - 1) / (pieces + stages - 1)


@dataclass(frozen=True)
class StepLaw:
    """t(r) = max(weights_ms, ms_per_row r): the milliseconds of a stage for r rows."""

    weights_ms: float
    ms_per_row: float

    def step_ms(self, rows: float) -> float:
        return max(self.weights_ms, self.ms_per_row * rows)

    @property
    def turning_rows(self) -> float:
        """With fewer rows reading the weights is the limit, with more computing is."""
        return self.weights_ms / self.ms_per_row

    def tokens_per_s(self, schedule: str, stages: int, batch: int, micro_batches: int, tokens: int) -> float:
        """New tokens of all rows per second."""
        taken = stage_times(schedule, stages, micro_batches, tokens) * self.step_ms(batch / micro_batches)
        return batch * tokens * 1e3 / taken

    @classmethod
    def through(cls, step_ms: dict[float, float]) -> StepLaw:
        """The law of measured milliseconds by rows: computing is taken from the step with the least time of a row, and
        reading from the quickest step.
        """
        return cls(min(step_ms.values()), min(ms / rows for rows, ms in step_ms.items()))


def _check(schedule: str, **counts: int) -> None:
    if schedule not in SCHEDULES:
        raise UserError(f"unknown schedule {schedule!r}; expected one of {', '.join(SCHEDULES)}")
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"got {name} = {count}, expected at least 1")
    if schedule == "naive" and counts.get("micro_batches", 1) > 1:
        raise UserError(f"got micro_batches = {counts['micro_batches']}; the schedule naive has one")
