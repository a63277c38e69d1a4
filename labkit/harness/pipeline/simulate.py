"""The ideal run of a schedule: stages of given times, to which handing over costs nothing."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal

from labkit.harness.pipeline.formulas import SCHEDULES
from labkit.harness.pipeline.records import StageSpan, bubble_of
from labkit.stages import Phase
from labkit.system.errors import UserError


def simulate(
    schedule: str, stage_ms: Sequence[float], tokens: int | Sequence[int], micro_batches: int = 1
) -> tuple[StageSpan, ...]:
    """What each stage does when, with `micro_batches` that make so many `tokens` each, behind their prompts.

    stage_ms: of each stage, for a step of one micro-batch. tokens: a number, or one for each micro-batch: with "queue"
    and "barrier" one that has ended leaves, with "rounds" its turns go on, as spans of the kind "idle". A stage takes
    micro-batches in the order in which they come. UserError for what cannot be.
    """
    wanted = [tokens] * micro_batches if isinstance(tokens, int) else list(tokens)
    _check(schedule, stage_ms, wanted, micro_batches)
    lasting = max(wanted) if schedule == "rounds" else 0
    free = [0.0] * len(stage_ms)
    ready = [(0.0, place, 1) for place in range(micro_batches)]  # when, which micro-batch, which step
    waiting: list[tuple[int, int]] = []  # at a barrier, for the others
    spans = []
    while ready:
        at, place, step = heapq.heappop(ready)
        for stage, ms in enumerate(stage_ms):
            begin = max(at, free[stage])
            at = free[stage] = begin + ms
            kind: Literal["compute", "idle"] = "compute" if step <= wanted[place] else "idle"
            spans.append(_step(kind, stage, place, step, begin, at))
        if step < max(wanted[place], lasting):
            if schedule == "barrier":
                waiting.append((place, step + 1))
            else:
                heapq.heappush(ready, (at, place, step + 1))
        if not ready:
            ready, waiting = [(at, *each) for each in sorted(waiting)], []
    return tuple(spans)


def simulated_bubble(spans: Sequence[StageSpan]) -> float:
    """The share of the stages' time, from the first span's beginning to the last one's end, without work."""
    stages = 1 + max(each.stage for each in spans)
    return bubble_of(spans, stages, min(each.begin_ms for each in spans), max(each.end_ms for each in spans))


def _check(schedule: str, stage_ms: Sequence[float], tokens: Sequence[int], micro_batches: int) -> None:
    if schedule not in SCHEDULES:
        raise UserError(f"unknown schedule {schedule!r}; expected one of {', '.join(SCHEDULES)}")
    if not stage_ms or not all(0 < ms < float("inf") for ms in stage_ms):
        raise UserError(f"got stage_ms = {list(stage_ms)}, expected a time above 0 for each stage")
    if micro_batches < 1 or (schedule == "naive" and micro_batches > 1):
        raise UserError(f"got micro_batches = {micro_batches}, expected {'1' if schedule == 'naive' else 'at least 1'}")
    if len(tokens) != micro_batches or min(tokens) < 1:
        raise UserError(f"got tokens = {list(tokens)} for {micro_batches} micro-batches, expected at least 1 of each")


def in_order(order: Sequence[int], stage_ms: Sequence[float]) -> tuple[StageSpan, ...]:
    """The run of equal micro-batches whose turns are given: each time that a micro-batch is named, its next step
    begins, as early as it can behind the turn before. UserError for stages without a time.
    """
    _check("queue", stage_ms, [1], 1)
    free, round_at, steps = [0.0] * len(stage_ms), dict[int, float](), dict[int, int]()
    spans = []
    for place in order:
        at, steps[place] = round_at.get(place, 0.0), steps.get(place, 0) + 1
        for stage, ms in enumerate(stage_ms):
            begin = max(at, free[stage])
            at = free[stage] = begin + ms
            spans.append(_step("compute", stage, place, steps[place], begin, at))
        round_at[place] = at
    return tuple(spans)


def _step(kind: Literal["compute", "idle"], stage: int, place: int, step: int, begin: float, end: float) -> StageSpan:
    return StageSpan(
        kind=kind, phase=Phase.DECODE, stage=stage, micro_batch=place, step=step, begin_ms=begin, end_ms=end
    )
