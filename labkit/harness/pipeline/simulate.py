"""The ideal run of a schedule: stages with given times, between which handing over costs nothing."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal

from labkit.harness.pipeline.formulas import check_schedule_name
from labkit.harness.pipeline.records import StageSpan, bubble_of
from labkit.stages import Phase
from labkit.system.errors import UserError


def simulate(
    schedule: str, stage_ms: Sequence[float], tokens: int | Sequence[int], micro_batches: int = 1
) -> tuple[StageSpan, ...]:
    """The spans of each stage for `micro_batches` that generate `tokens` tokens each after their prompts.

    stage_ms: time of each stage for a step of one micro-batch.
    tokens: a number, or one for each micro-batch. With "queue" and "barrier" a micro-batch that has ended leaves. With
    "rounds" its turns continue, as spans of the kind "idle".

    A stage takes micro-batches in the order of their arrival. UserError for impossible arguments.
    """
    tokens_of = [tokens] * micro_batches if isinstance(tokens, int) else list(tokens)
    _check(schedule, stage_ms, tokens_of, micro_batches)
    rounds = max(tokens_of) if schedule == "rounds" else 0
    free = [0.0] * len(stage_ms)
    ready = [(0.0, micro_batch, 1) for micro_batch in range(micro_batches)]  # time, micro-batch, step
    waiting: list[tuple[int, int]] = []  # micro-batches and steps that wait at a barrier
    spans = []
    while ready:
        at, micro_batch, step = heapq.heappop(ready)
        for stage, ms in enumerate(stage_ms):
            begin = max(at, free[stage])
            at = free[stage] = begin + ms
            kind: Literal["compute", "idle"] = "compute" if step <= tokens_of[micro_batch] else "idle"
            spans.append(_step(kind, stage, micro_batch, step, begin, at))
        if step < max(tokens_of[micro_batch], rounds):
            if schedule == "barrier":
                waiting.append((micro_batch, step + 1))
            else:
                heapq.heappush(ready, (at, micro_batch, step + 1))
        if not ready:
            ready, waiting = [(at, *turn) for turn in sorted(waiting)], []
    return tuple(spans)


def simulated_bubble(spans: Sequence[StageSpan]) -> float:
    """The idle share of the stages' time from the beginning of the first span to the end of the last."""
    stages = 1 + max(span.stage for span in spans)
    return bubble_of(spans, stages, min(span.begin_ms for span in spans), max(span.end_ms for span in spans))


def in_order(order: Sequence[int], stage_ms: Sequence[float]) -> tuple[StageSpan, ...]:
    """The run of equal micro-batches in a given order of turns. Each turn of a micro-batch is its next step, which
    begins as early as possible after the turn before. UserError for stages without a time.
    """
    _check("queue", stage_ms, [1], 1)
    free, passed_at, steps = [0.0] * len(stage_ms), dict[int, float](), dict[int, int]()
    spans = []
    for micro_batch in order:
        at, steps[micro_batch] = passed_at.get(micro_batch, 0.0), steps.get(micro_batch, 0) + 1
        for stage, ms in enumerate(stage_ms):
            begin = max(at, free[stage])
            at = free[stage] = begin + ms
            spans.append(_step("compute", stage, micro_batch, steps[micro_batch], begin, at))
        passed_at[micro_batch] = at
    return tuple(spans)


def _check(schedule: str, stage_ms: Sequence[float], tokens: Sequence[int], micro_batches: int) -> None:
    check_schedule_name(schedule)
    if not stage_ms or not all(0 < ms < float("inf") for ms in stage_ms):
        raise UserError(f"got stage_ms = {list(stage_ms)}, expected a time above 0 for each stage")
    if micro_batches < 1 or (schedule == "naive" and micro_batches > 1):
        raise UserError(f"got micro_batches = {micro_batches}, expected {'1' if schedule == 'naive' else 'at least 1'}")
    if len(tokens) != micro_batches or min(tokens) < 1:
        raise UserError(f"got tokens = {list(tokens)} for {micro_batches} micro-batches, expected at least 1 of each")


def _step(
    kind: Literal["compute", "idle"], stage: int, micro_batch: int, step: int, begin: float, end: float
) -> StageSpan:
    return StageSpan(
        kind=kind, phase=Phase.DECODE, stage=stage, micro_batch=micro_batch, step=step, begin_ms=begin, end_ms=end
    )
