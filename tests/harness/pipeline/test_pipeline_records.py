"""Figures that are computed from a record of a pipeline, and the record read back from its file."""

from pathlib import Path
from typing import Any

import pytest
from helpers.studies.pipeline_studies import BATCH, NEW, PROMPT_MS, STAGES, TIMES, run, study

from labkit.harness.pipeline.formulas import bubble, stage_times
from labkit.harness.pipeline.measure import settings_of
from labkit.harness.pipeline.records import bubble_of
from labkit.studies.pipeline import load_study, parse_parts, parse_schedules, save_study
from labkit.system.errors import UserError


@pytest.mark.parametrize(
    ("schedule", "parts"), [("queue", 2), ("queue", 4), ("rounds", 2), ("barrier", 4), ("naive", 1)]
)
def test_an_ideal_run_has_the_bubble_of_its_formula(schedule: str, parts: int) -> None:
    record = run(schedule, parts)
    assert record.bubble == pytest.approx(record.formula) == pytest.approx(bubble(schedule, STAGES, parts, NEW - 1))
    assert record.step_ms == pytest.approx((TIMES[parts],) * STAGES)
    assert record.prompt_ms == STAGES * PROMPT_MS
    assert record.prompt_bubble == pytest.approx(record.prompt_formula) == pytest.approx(0.5)
    seconds = stage_times(schedule, STAGES, parts, NEW - 1) * TIMES[parts] / 1e3
    assert record.tokens_per_s == pytest.approx(BATCH * (NEW - 1) / seconds)


def test_work_counts_only_within_the_requested_time() -> None:
    spans = run("queue", 2).spans
    assert bubble_of(spans, STAGES, PROMPT_MS / 2, PROMPT_MS) == pytest.approx(0.5)
    assert bubble_of([span for span in spans if span.kind == "wait"], STAGES, 0.0, 10.0) == 1.0


def test_a_study_says_what_it_found() -> None:
    record = study()
    assert [shown.name for shown in record.shown] == ["naive", "barrier, m = 2", "queue, m = 2"]
    assert record.gains["naive"] == 1.0
    assert record.gains["queue, m = 2"] == pytest.approx(10 * 8 / (11 * 4))
    assert record.law is not None
    assert (record.law.weights_ms, record.law.ms_per_row) == (TIMES[4], 1.0)
    assert record.most_parts == pytest.approx(8 / 3)
    assert record.against_tensor_parallel() == pytest.approx({2: 250 / 300, 8: 250 / 300})
    assert record.farthest.bubble == pytest.approx(record.farthest.formula)
    assert record.trust.trustworthy
    assert "queue, m = 2 makes 1.82x [1.8" in record.headline
    assert "] naive's tokens" in record.headline


def test_unequal_stages_are_told_from_the_schedule() -> None:
    uneven = run("queue", 2, stage_ms=(4.0, 8.0))
    record = study(runs=(uneven,))
    assert record.unequal(uneven) == pytest.approx(uneven.bubble)
    assert uneven.bubble - uneven.formula > 0.15


def test_without_small_steps_the_limit_by_weights_is_unknown() -> None:
    assert study(runs=(run("queue", 2), run("naive", 1))).most_parts is None
    assert study(runs=(run("naive", 1),)).law is None


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        ({"bubbles": ((0.1, 0.1),) * 5}, "2 rounds, fewer than 6"),
        ({"rates": ((400.0, 900.0, 400.0, 900.0, 300.0, 500.0), *((500.0,) * 6,) * 4)}, "is wide"),
        ({"rates": ()}, "is wide"),  # as in an older record, which has no rounds
        ({"pinned": False}, "no cores of their own"),
        ({"others_cores": 1.0}, "other programs used 1.0"),
    ],
)
def test_what_weakens_the_figures_is_said(change: dict[str, Any], doubt: str) -> None:
    record = study(**change)
    assert doubt in record.headline
    assert not record.outcome.trusted


def test_a_frame_has_a_row_for_each_schedule_and_each_way() -> None:
    record = study()
    frame = record.to_frame()
    assert len(frame) == len(record.measured.runs) + len(record.measured.ways)
    assert {"model", "dtype", "machine", "prompt_tokens", "tokens_per_s", "bubble"} <= set(frame.columns)
    assert len(repr(record)) < 600


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    record = study()
    file = save_study(record, tmp_path)
    assert load_study(file) == record
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
    settings = settings_of(("queue", "naive"), (2, 4), 8, 2)
    assert [(setting.schedule, setting.micro_batches) for setting in settings] == [
        ("queue", 2),
        ("queue", 4),
        ("naive", 1),
    ]


def test_lists_are_read() -> None:
    assert parse_schedules("naive, queue, naive") == ("naive", "queue")
    assert parse_parts("4,2, 4") == (2, 4)
