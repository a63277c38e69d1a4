"""What is computed from a record of a pipeline, and that it comes back from its file as it was."""

from pathlib import Path
from typing import Any

import pytest
from pipeline_studies import BATCH, NEW, PROMPT_MS, STAGES, TIMES, run, study

from labkit.harness.pipeline.formulas import bubble, stage_times
from labkit.harness.pipeline.measure import settings_of
from labkit.harness.pipeline.records import bubble_of
from labkit.studies.pipeline import load_study, parse_parts, parse_schedules, save_study
from labkit.system.errors import UserError


@pytest.mark.parametrize(
    ("schedule", "parts"), [("queue", 2), ("queue", 4), ("rounds", 2), ("barrier", 4), ("naive", 1)]
)
def test_an_ideal_run_has_the_bubble_of_its_formula(schedule: str, parts: int) -> None:
    found = run(schedule, parts)
    assert found.bubble == pytest.approx(found.formula) == pytest.approx(bubble(schedule, STAGES, parts, NEW - 1))
    assert found.step_ms == pytest.approx((TIMES[parts],) * STAGES)
    assert found.prompt_ms == STAGES * PROMPT_MS
    assert found.prompt_bubble == pytest.approx(found.prompt_formula) == pytest.approx(0.5)
    seconds = stage_times(schedule, STAGES, parts, NEW - 1) * TIMES[parts] / 1e3
    assert found.tokens_per_s == pytest.approx(BATCH * (NEW - 1) / seconds)


def test_work_counts_only_within_the_time_that_is_asked_about() -> None:
    spans = run("queue", 2).spans
    assert bubble_of(spans, STAGES, PROMPT_MS / 2, PROMPT_MS) == pytest.approx(0.5)
    assert bubble_of([each for each in spans if each.kind == "wait"], STAGES, 0.0, 10.0) == 1.0


def test_a_study_says_what_it_found() -> None:
    found = study()
    assert [each.name for each in found.shown] == ["naive", "barrier, m = 2", "queue, m = 2"]
    assert found.gains["naive"] == 1.0
    assert found.gains["queue, m = 2"] == pytest.approx(10 * 8 / (11 * 4))
    assert found.law is not None
    assert (found.law.weights_ms, found.law.ms_per_row) == (TIMES[4], 1.0)
    assert found.most_parts == pytest.approx(8 / 3)
    assert found.against_tensor_parallel() == pytest.approx({2: 250 / 300, 8: 250 / 300})
    assert found.farthest.bubble == pytest.approx(found.farthest.formula)
    assert found.trust.trustworthy
    assert "queue, m = 2 makes 1.82x [1.8" in found.headline
    assert "] naive's tokens" in found.headline


def test_unequal_stages_are_told_from_the_schedule() -> None:
    uneven = run("queue", 2, stage_ms=(4.0, 8.0))
    found = study(runs=(uneven,))
    assert found.unequal(uneven) == pytest.approx(uneven.bubble)
    assert uneven.bubble - uneven.formula > 0.15


def test_without_small_steps_nobody_knows_where_weights_are_the_limit() -> None:
    assert study(runs=(run("queue", 2), run("naive", 1))).most_parts is None
    assert study(runs=(run("naive", 1),)).law is None


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        ({"bubbles": ((0.1, 0.1),) * 5}, "2 rounds, fewer than 6"),
        ({"rates": ((400.0, 900.0, 400.0, 900.0, 300.0, 500.0), *((500.0,) * 6,) * 4)}, "is wide"),
        ({"rates": ()}, "is wide"),  # of an older record, which has no rounds
        ({"pinned": False}, "no cores of their own"),
        ({"others_cores": 1.0}, "other programs used 1.0"),
    ],
)
def test_what_weakens_the_figures_is_said(change: dict[str, Any], doubt: str) -> None:
    found = study(**change)
    assert doubt in found.headline
    assert not found.outcome.trusted


def test_a_frame_has_a_row_for_each_schedule_and_each_way() -> None:
    found = study()
    frame = found.to_frame()
    assert len(frame) == len(found.measured.runs) + len(found.measured.ways)
    assert {"model", "dtype", "machine", "prompt_tokens", "tokens_per_s", "bubble"} <= set(frame.columns)
    assert len(repr(found)) < 600


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    found = study()
    file = save_study(found, tmp_path)
    assert load_study(file) == found
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((("que",), (2,), 8, 2), "unknown schedule 'que'"),
        (((), (2,), 8, 2), "got no schedule"),
        ((("queue",), (9,), 8, 2), "got micro_batches = 9 for a batch of 8 rows"),
        ((("queue",), (2,), 8, 1), "got stages = 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings_of(*arguments)


def test_naive_is_measured_once() -> None:
    found = settings_of(("queue", "naive"), (2, 4), 8, 2)
    assert [(each.schedule, each.micro_batches) for each in found] == [("queue", 2), ("queue", 4), ("naive", 1)]


def test_lists_are_read() -> None:
    assert parse_schedules("naive, queue, naive") == ("naive", "queue")
    assert parse_parts("4,2, 4") == (2, 4)
