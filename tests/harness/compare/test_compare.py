"""`compare` checks its arguments before it measures, and never loses a measured result."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.studies.comparisons import comparison

from labkit.harness import load_records, results
from labkit.harness.compare import compare as module
from labkit.harness.compare import interleave
from labkit.harness.compare.compare import compare, comparison_case
from labkit.harness.compare.plan import Schedule
from labkit.harness.quiet import NotQuietError
from labkit.harness.results import SaveError, save
from labkit.harness.runs import Case


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments that `compare` passes on to the measurement, which is replaced by a made-up comparison."""
    arguments: dict[str, Any] = {}

    def record_arguments(
        baselines: tuple[str, ...], candidate: str, case: Case, schedule: Schedule, **options: Any
    ) -> Any:
        arguments.update(baselines=baselines, candidate=candidate, case=case, schedule=schedule)
        return (comparison(),)

    monkeypatch.setattr(module, "compare_with_each", record_arguments)
    return arguments


def disk_full(path: Path, text: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_keywords_become_a_case_and_a_schedule(measured: dict[str, Any]) -> None:
    compare("hf-gemm", "fused", model="gpt2", prompt=5, new=6, threads=2, tp=2, budget_s=9, seed=3, output=None)
    assert measured["baselines"] == ("hf-gemm",)
    case = Case(model="gpt2", dtype="float32", batch=1, prompt_tokens=5, new_tokens=6, threads=2, tp=2)
    assert measured["case"] == case
    assert measured["schedule"] == Schedule(rounds=None, budget_s=9, seed=3)
    compare(model="gpt2", rounds=5, precision=0.02, output=None)
    assert measured["schedule"] == Schedule(rounds=5, precision=0.02)
    compare(model="gpt2", output=None)
    assert measured["schedule"] == Schedule(rounds=None, budget_s=60)


@pytest.mark.usefixtures("measured")
def test_a_result_that_cannot_be_saved_is_returned_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "write_whole", disk_full)
    with pytest.warns(UserWarning, match=r"could not be saved as .*\.jsonl: No space left on device; make room"):
        record = compare(model="gpt2", output=tmp_path)
    assert record == comparison()


@pytest.mark.usefixtures("measured")
def test_a_result_is_saved(tmp_path: Path) -> None:
    assert compare(model="gpt2", output=tmp_path) == load_records(tmp_path)[0]


def test_saving_names_file_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "write_whole", disk_full)
    with pytest.raises(SaveError, match=r"hf-eager-vs-fused\.jsonl: No space left on device; make room there"):
        save(comparison(), tmp_path)


@pytest.mark.parametrize("kind", ["file", "no room"])
def test_a_folder_that_cannot_be_used_is_refused_before_anything_starts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*args: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(interleave, "SideProcesses", started)
    (tmp_path / "runs").write_text("")
    folder = tmp_path / "runs" if kind == "file" else tmp_path
    if kind == "no room":
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0}))
    with pytest.raises(ValueError, match="results cannot be written to the folder"):
        compare(model="tiny-gpt2", prompt=4, new=4, output=folder)


def test_a_machine_that_does_not_become_quiet_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[float, int]] = []

    def never_quiet(limit_s: float, *, needed: int, progress: object) -> None:
        calls.append((limit_s, needed))
        raise NotQuietError("busy")

    monkeypatch.setattr(interleave, "wait_until_quiet", never_quiet)
    monkeypatch.setattr(interleave, "comparison_device", lambda: type("Cpu", (), {"type": "cpu"}))
    with pytest.raises(RuntimeError, match="busy"):
        compare(model="tiny-gpt2", prompt=4, new=4, threads=2, wait_quiet_s=7, output=None)
    assert calls == [(7, 2)]


@pytest.mark.parametrize("budget_s", [0, -1.0, float("nan")])
def test_a_budget_of_nothing_is_refused(budget_s: float) -> None:
    with pytest.raises(ValueError, match=r"got budget_s = .*, expected (more than 0|a number)"):
        compare(model="tiny-gpt2", prompt=4, new=4, budget_s=budget_s, output=None)


def test_threads_are_shared_out_among_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.harness.compare.compare.team_size", lambda: 8)
    size: dict[str, Any] = {"model": "gpt2", "dtype": "float32", "batch": 1, "prompt": 4, "new": 4}
    assert comparison_case(**size).threads == 8
    assert comparison_case(**size, tp=3).threads == 2
    assert comparison_case(**size, tp=9).threads == 1
    assert comparison_case(**size, threads=5, tp=9).threads == 5
