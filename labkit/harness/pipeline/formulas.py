"""Formulas for the cost of a schedule on a pipeline of equal stages.

P stages, m micro-batches, G tokens of each row after its first token, and t, the time of a stage for one micro-batch.
Handing over costs nothing. The bubble is the idle share of P times the wall time: each stage works for G m t.

- barrier: every token is a pipeline of its own that fills and drains, like a batch of GPipe (Huang et al., 2019,
  section 2.3). The first micro-batch has passed after P t, and the others follow t apart: G (m + P - 1) t.
- queue, of DeepSpeed Inference (Aminabadi et al., SC22, section IV): a micro-batch passes all stages in P t. With
  m >= P the first stage never waits, and the last stage ends P - 1 stage times later: (G m + P - 1) t. With m < P a
  token takes P t, and the last micro-batch is m - 1 stage times later than the first: (G P + m - 1) t.
- rounds: as queue, where all micro-batches have equally many tokens.
- naive: one micro-batch of all rows: G P t.

A stage of W / P bytes of weights takes t(r) = max(W / (P BW), c r) for r rows: it reads its weights at the rate BW, and
multiplies the rows by them. So at one batch b, the queue of P micro-batches is t(b) / t(b / P) times faster than naive:
P times where computing is the limit, and no faster where reading weights is.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.system.errors import UserError

SCHEDULES = ("queue", "rounds", "barrier", "naive")


def stage_times(schedule: str, stages: int, micro_batches: int, tokens: int) -> int:
    """The number of stage times that the schedule takes from the first token after the prompt to the last.

    naive has one micro-batch, so its stage times are times for all rows. UserError for numbers below 1, and for naive
    with several micro-batches.
    """
    _check(schedule, stages=stages, micro_batches=micro_batches, tokens=tokens)
    if schedule == "barrier":
        return tokens * (micro_batches + stages - 1)
    return tokens * max(micro_batches, stages) + min(micro_batches, stages) - 1


def bubble(schedule: str, stages: int, micro_batches: int, tokens: int) -> float:
    """The idle share of the stages' time, from 0 to 1. UserError as for `stage_times`."""
    return 1 - tokens * micro_batches / stage_times(schedule, stages, micro_batches, tokens)


def prompt_bubble(schedule: str, stages: int, pieces: int) -> float:
    """The idle share of the stages' time during the prompt. `pieces`, of all micro-batches, pass through the stages one
    after the other: n pieces take (n + P - 1) T / n in all, with T for a stage. A micro-batch has several pieces if its
    prompt has more rows than a step. With naive, a stage passes nothing on until it has all pieces.
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
        """Rows at which the limit changes: reading the weights below, computing above."""
        return self.weights_ms / self.ms_per_row

    def tokens_per_s(self, schedule: str, stages: int, batch: int, micro_batches: int, tokens: int) -> float:
        """New tokens of all rows per second."""
        taken = stage_times(schedule, stages, micro_batches, tokens) * self.step_ms(batch / micro_batches)
        return batch * tokens * 1e3 / taken

    @classmethod
    def through(cls, step_ms: dict[float, float]) -> StepLaw:
        """The law of measured milliseconds by rows. The least time per row gives the computing, and the quickest step
        gives the reading.
        """
        return cls(min(step_ms.values()), min(ms / rows for rows, ms in step_ms.items()))


def check_schedule_name(name: str) -> None:
    """UserError for an unknown schedule."""
    if name not in SCHEDULES:
        raise UserError(f"unknown schedule {name!r}; expected one of {', '.join(SCHEDULES)}")


def _check(schedule: str, **counts: int) -> None:
    check_schedule_name(schedule)
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"got {name} = {count}, expected at least 1")
    if schedule == "naive" and counts.get("micro_batches", 1) > 1:
        raise UserError(f"got micro_batches = {counts['micro_batches']}; the schedule naive has one")
