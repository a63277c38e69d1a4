"""Study of tensor parallelism: what its capture may do to its measurements."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.studies.comparisons import comparison
from helpers.studies.parallel_studies import GAINS, ONE_RANK_MS, WAITS, study

from labkit.harness import load_records
from labkit.harness.compare.plan import Schedule
from labkit.nsys.capture.result import CaptureError
from labkit.studies import parallel
from labkit.system.errors import UserError


@pytest.mark.parametrize("error", [CaptureError("no profiler"), UserError("no program labkit")])
def test_a_capture_that_fails_leaves_the_measurements(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: Any, progress: Any, **options: Any) -> SimpleNamespace:
        progress(1, 1, "")
        return SimpleNamespace(comparison=lambda *_: comparison(), interrupted=False)

    def refused(*_: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(parallel, "take_turns", measured)
    monkeypatch.setattr(parallel, "capture_ranks", refused)
    study = parallel.study_parallel(output=tmp_path)
    assert study.comparisons == (comparison(),)
    assert study.remarks == (f"the ranks could not be captured: {error}",)


def test_an_interrupt_keeps_the_comparisons_and_captures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, progress: Any, **options: Any) -> SimpleNamespace:
        progress(1, 1, "")
        return SimpleNamespace(comparison=lambda *_: comparison(), interrupted=True)

    shown: list[Any] = []
    monkeypatch.setattr(parallel, "take_turns", interrupted)
    monkeypatch.setattr(parallel, "capture_ranks", lambda *_, **options: pytest.fail("captured"))
    with pytest.raises(KeyboardInterrupt):
        parallel.study_parallel(output=tmp_path, show=shown.append)
    assert [study.comparisons for study in shown] == [(comparison(),)]
    assert load_records(tmp_path) == [comparison()]


@pytest.mark.parametrize(("rounds", "schedule"), [(0, Schedule(rounds=None, budget_s=60.0)), (4, Schedule(rounds=4))])
def test_epochs_end_with_the_verdicts_or_after_a_fixed_number(
    rounds: int, schedule: Schedule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules: list[Schedule] = []

    def measured(sides: Any, case: Any, schedule: Schedule, *, progress: Any, **options: Any) -> SimpleNamespace:
        progress(1, 1, "")
        schedules.append(schedule)
        return SimpleNamespace(comparison=lambda *_: comparison(), interrupted=True)

    monkeypatch.setattr(parallel, "take_turns", measured)
    with pytest.raises(KeyboardInterrupt):
        parallel.study_parallel(output=tmp_path, rounds=rounds)
    assert schedules == [schedule]


def test_a_row_of_the_frame_is_a_number_of_ranks_with_the_gain_over_one() -> None:
    made = study()
    frame = made.to_frame()
    assert frame["ranks"].tolist() == [1, *GAINS]
    assert set(frame["threads"]) == {1}
    assert frame["per_token_ms"].tolist() == pytest.approx(
        [ONE_RANK_MS, *(ONE_RANK_MS / gain for gain in GAINS.values())]
    )
    assert math.isnan(frame["times_faster"][0])
    assert frame["times_faster"].tolist()[1:] == pytest.approx(list(GAINS.values()))
    assert (frame["low"] <= frame["high"]).tolist() == [False, True, True]
    assert frame["most_waiting"].tolist() == pytest.approx([0.0, max(WAITS[:2]), max(WAITS)])
    assert set(frame["model"]) == {"gpt2"}
    assert set(frame["machine"]) == {made.outcome.machine}


@pytest.mark.parametrize("captured", [True, False])
def test_a_study_of_ranks_is_one_short_line_and_its_table_has_a_row_for_each_number_of_ranks(captured: bool) -> None:
    """The study holds thousands of samples, and the paths of a capture."""
    made = study() if captured else replace(study(), capture=None, remarks=("no profiler",))
    assert repr(made).startswith("<ParallelStudy gpt2")
    assert made.claim in repr(made)
    assert len(repr(made).splitlines()) == 1
    assert len(repr(made)) < 500
    assert [row[0] for row in made.table().rows] == ["1", "2", "4"]
    assert made.claim in str(made).replace("\n", " ")
