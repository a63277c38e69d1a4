"""Formulas and simulated runs of the schedules agree exactly."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest

from labkit.engine.runners.pipeline.schedules import SCHEDULES as BUILT
from labkit.harness.pipeline.formulas import SCHEDULES, StepLaw, bubble, prompt_bubble, stage_times
from labkit.harness.pipeline.records import StageSpan
from labkit.harness.pipeline.simulate import in_order, simulate, simulated_bubble
from labkit.system.errors import UserError


def end(spans: Sequence[StageSpan]) -> float:
    return max(span.end_ms for span in spans)


def test_the_schedules_are_those_of_the_engine() -> None:
    assert set(SCHEDULES) == set(BUILT)


def test_simulated_runs_take_exactly_what_the_formulas_say() -> None:
    for schedule, stages, parts, tokens in product(SCHEDULES, range(1, 6), range(1, 8), range(1, 6)):
        if schedule == "naive" and parts > 1:
            continue
        spans = simulate(schedule, [1.0] * stages, tokens, parts)
        case = (schedule, stages, parts, tokens)
        assert end(spans) == stage_times(*case), case
        assert len(spans) == stages * parts * tokens
        assert simulated_bubble(spans) == pytest.approx(bubble(*case), abs=1e-12), case


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_stage_does_two_things_at_once_and_no_step_begins_before_the_one_before_it(schedule: str) -> None:
    spans = simulate(schedule, [3.0, 1.0, 2.0], 4, 1 if schedule == "naive" else 3)
    done: dict[tuple[int, int], float] = {}
    free = [0.0] * 3
    for span in sorted(spans, key=lambda span: (span.begin_ms, span.stage)):
        assert span.begin_ms >= free[span.stage]
        assert span.begin_ms >= done.get((span.micro_batch, span.step), 0.0)
        assert span.begin_ms >= done.get((span.micro_batch, span.step - 1), 0.0)
        free[span.stage] = done[span.micro_batch, span.step] = span.end_ms


def test_unequal_stages_wait_for_the_slowest() -> None:
    spans = simulate("queue", [1.0, 2.0], 50, 4)
    assert end(spans) == 1 + 50 * 4 * 2
    assert simulated_bubble(spans) == pytest.approx(0.25, abs=0.005)


def test_rounds_go_on_with_what_has_ended_and_the_queue_does_not() -> None:
    queue, rounds = (simulate(name, [1, 1], [6, 6, 1, 1], 4) for name in ("queue", "rounds"))
    assert end(rounds) == stage_times("rounds", 2, 4, 6)
    assert end(queue) == 6 + 6 + 1 + 1 + 1
    assert sum(span.kind == "idle" for span in rounds) == 2 * 10
    assert not [span for span in queue if span.kind == "idle"]


def test_turns_in_the_queues_order_run_as_the_queue_does() -> None:
    turns = [micro_batch for _ in range(5) for micro_batch in range(3)]
    assert in_order(turns, [1, 1, 1]) == simulate("queue", [1, 1, 1], 5, 3)
    assert end(in_order([0, 0, 1, 1], [1, 1])) == 7  # the first stage waits for a token, and then for another


def test_prompts_in_pieces_overlap_but_for_naive() -> None:
    assert prompt_bubble("queue", 3, 4) == pytest.approx(bubble("barrier", 3, 4, 1)) == pytest.approx(2 / 6)
    assert prompt_bubble("naive", 3, 4) == pytest.approx(2 / 3)


def test_micro_batches_pay_until_reading_weights_is_the_limit() -> None:
    law = StepLaw.through({16.0: 32.0, 8.0: 16.0, 4.0: 10.0, 2.0: 10.0})
    assert (law.weights_ms, law.ms_per_row, law.turning_rows) == (10.0, 2.0, 5.0)
    bound, free = StepLaw(10.0, 1e-9), StepLaw(1e-9, 1.0)
    for law, gain in ((bound, 1.0), (free, 4.0)):
        queue, naive = (law.tokens_per_s(*case, 10_000) for case in (("queue", 4, 32, 4), ("naive", 4, 32, 1)))
        assert queue / naive == pytest.approx(gain, rel=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stage_times("que", 2, 2, 2), "unknown schedule 'que'"),
        (lambda: stage_times("naive", 2, 2, 2), "the schedule naive has one"),
        (lambda: bubble("queue", 0, 2, 2), "got stages = 0"),
        (lambda: simulate("queue", [], 2), "expected a time above 0"),
        (lambda: simulate("queue", [1, 0], 2), "expected a time above 0"),
        (lambda: simulate("queue", [1], [2, 2], 3), "for 3 micro-batches"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()
