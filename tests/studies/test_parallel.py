"""Study of tensor parallelism: what its capture may do to its measurements."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.studies.comparisons import comparison

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
