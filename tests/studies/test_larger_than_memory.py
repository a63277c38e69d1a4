"""The study of a model that is larger than memory: its calls of the harness, the baselines it omits, its record."""

from pathlib import Path
from typing import Any

import pytest
from helpers.studies.comparisons import comparison
from helpers.studies.streaming_plans import plan, point
from helpers.studies.streaming_studies import study

from labkit.harness.compare.side_process import WorkerError
from labkit.harness.streaming.plan import StreamingPlan
from labkit.studies import larger_than_memory
from labkit.studies.larger_than_memory import (
    STREAMED,
    compared_case,
    load_study,
    parse_batches,
    save_study,
    study_larger_than_memory,
)
from labkit.system.errors import UserError


class RecordingHarness:
    """Replaces the harness: records the calls of the study and returns known results instead of measuring."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, precision: str = "bfloat16") -> None:
        self.folders: list[Path] = []
        self.batches: tuple[int, ...] = ()
        self.turns: list[Any] = []
        known = plan()
        self.plan = known.model_copy(update={"case": known.case.model_copy(update={"precision": precision})})
        monkeypatch.setattr(larger_than_memory, "plan_streaming", self.planned)
        monkeypatch.setattr(larger_than_memory, "measured_plan", self.measured)
        monkeypatch.setattr(larger_than_memory, "take_turns", self.took_turns)

    def planned(self, model: str, *, path: Path, **options: Any) -> StreamingPlan:
        self.folders.append(path)
        assert path.is_dir()
        return self.plan

    def measured(self, known: StreamingPlan, *, batches: tuple[int, ...], path: Path, **options: Any) -> Any:
        assert path == self.folders[-1]
        self.batches = batches
        return known.model_copy(update={"points": tuple(point(batch) for batch in batches)}), study().memory

    def took_turns(self, sides: Any, case: Any, schedule: Any, *, progress: Any) -> Any:
        self.turns.append((tuple(side.name for side in sides), case, schedule))
        if sides[0].name == "dies":
            raise WorkerError("dies: out of memory (MemoryError)\nmore lines")
        if sides[0].name == "unknown":
            raise UserError("unknown side 'unknown'")

        class Turns:
            comparison = staticmethod(lambda baseline, candidate: comparison())

        return Turns()


def test_each_baseline_runs_beside_the_streamed_engine_in_the_same_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A baseline that fails or is unknown is left out, with the first line of the reason."""
    harness = RecordingHarness(monkeypatch)
    result = study_larger_than_memory(
        batches="4, 1, 5000", baselines="accelerate-disk, dies, unknown", path=str(tmp_path), output=tmp_path
    )
    assert harness.batches == (1, 4)
    assert result.too_large == (5000,)
    assert [names for names, *_ in harness.turns] == [
        (name, STREAMED) for name in ("accelerate-disk", "dies", "unknown")
    ]
    for _, case, schedule in harness.turns:
        assert (case.batch, case.memory_gb, case.dtype) == (1, 1.5, "bfloat16")
        assert not schedule.stages
    assert len(result.comparisons) == 1
    assert [(omission.side, omission.reason) for omission in result.left_out] == [
        ("dies", "dies: out of memory (MemoryError)"),
        ("unknown", "unknown side 'unknown'"),
    ]
    (file,) = tmp_path.glob("*-gpt2-larger-than-memory.json")
    assert load_study(file) == result


def test_baselines_do_not_compute_in_codes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    harness = RecordingHarness(monkeypatch, precision="int8-32")
    result = study_larger_than_memory(batches="1", baselines="hf-disk", path=str(tmp_path), output=tmp_path)
    assert harness.turns == []
    assert "the weights here are int8-32" in result.left_out[0].reason


def test_a_temporary_folder_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    harness = RecordingHarness(monkeypatch)
    study_larger_than_memory(batches="1", baselines="", output=tmp_path)
    (folder,) = harness.folders
    assert tmp_path in folder.parents
    assert not folder.exists()


def test_a_case_in_a_budget_can_be_kept() -> None:
    case = compared_case(plan(), 4)
    assert (case.batch, case.new_tokens) == (4, larger_than_memory.COMPARED_NEW)
    assert type(case).model_validate_json(case.model_dump_json()).batch == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": ""}, "got batches = '', expected numbers of sequences"),
        ({"batches": "1, few"}, "got batches = '1, few'"),
        ({"batches": "0"}, "got batches = '0'"),
        ({"batches": "5000"}, "in 0.5 GB, expected one of at most"),
        ({"path": "/nowhere"}, "got path = '/nowhere', which is no folder"),
        ({"output": "/proc/nowhere"}, "/proc/nowhere"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    RecordingHarness(monkeypatch)
    monkeypatch.setattr(larger_than_memory, "measured_plan", lambda *args, **kwargs: pytest.fail("measured"))
    with pytest.raises(UserError, match=message):
        study_larger_than_memory(**({"path": str(tmp_path), "output": tmp_path} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "tiny-lama"}, "unknown model 'tiny-lama'"),
        ({"model": "tiny-llama", "memory_gb": 0.01}, "the least that works with 3 slots is"),
        ({"model": "tiny-llama", "precision": "int5"}, "unknown precision 'int5'"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        study_larger_than_memory(path=str(tmp_path), output=tmp_path, **options)


def test_batches_are_parsed_and_each_is_taken_once() -> None:
    assert parse_batches(" 16,1, 4,,1") == (1, 4, 16)


def test_the_claim_says_what_batch_pays_and_how_much_of_the_disk_that_takes() -> None:
    result = study()
    gains = "batch 1 gives 0.667 tokens/s and batch 16 gives 10.7"
    assert result.claim.startswith(f"gpt2, bfloat16, 1.47 times its memory: {gains};")
    assert "its steps read at 100% of the disk's rate and hide 100%" in result.claim
    assert result.outcome.trusted
    heavy = result.plan.model_copy(update={"points": (point(1, peak_bytes=2_000_000_000),)})
    assert not study(plan=heavy).outcome.trusted
    assert "more than it was given" in study(plan=heavy).headline


def test_a_study_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    saved = study()
    assert load_study(save_study(saved, tmp_path)) == saved


def test_what_is_no_study_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"kind": "comparison"}')
    with pytest.raises(UserError, match="no streaming study"):
        load_study(path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"runs_ms": ()}, "batches 1, 4: 1 round, fewer than 6"),
        ({"runs_ms": (1500.0, 1490.0)}, "2 rounds, fewer than 6"),
        ({"others_cores": 2.0}, "other programs used 2.0 of the processors"),
        ({"runs_ms": (900.0, 1900.0, 900.0, 1900.0, 900.0, 1900.0)}, "is wide"),
        ({"peak_bytes": 2_000_000_000}, "more than it was given"),
    ],
)
def test_a_study_has_the_grade_of_every_result(change: dict[str, Any], why: str) -> None:
    result = study(plan=plan(points=tuple(point(batch, **change) for batch in (1, 4))))
    assert result.outcome.trusted == (not why)
    assert why in result.outcome.grade
    assert ("NOT TRUSTWORTHY" in str(result)) == bool(why)


def test_a_frame_has_a_row_for_each_batch_and_each_baseline() -> None:
    frame = study().to_frame()
    assert list(frame["side"]) == ["fused-streamed"] * 3 + ["hf-eager"]
    assert {"machine", "model", "dtype", "batch", "prompt_tokens", "step_ms", "trustworthy"} <= set(frame.columns)
    assert len(repr(study())) < 600
