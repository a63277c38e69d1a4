"""`capture_pair` takes two captures of the same work; `bundled_pair` reads the two that come with labkit."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.nsys.nsight import needs_nsys
from helpers.sweeps import sweep

from labkit.figures.captures import captures_table
from labkit.nsys.capture.result import Capture, CaptureError, CommandFailedError
from labkit.statistics import Verdict
from labkit.studies import traces as module
from labkit.studies.traces import bundled_pair, capture_pair
from labkit.widgets import TraceBench

STEPS = 5


@sweep
@needs_nsys
def test_both_sides_have_the_same_steps_and_stages(tmp_path: Path) -> None:
    pair = capture_pair("tiny-gpt2", steps=STEPS, output=tmp_path, threads=1, tax=False)
    assert pair.names == ("hf-eager", "fused")
    assert pair.decode_steps == STEPS
    stages = [set(table.frame["stage"]) for table in pair.tables]
    assert stages[0] == stages[1]
    assert pair.difference.vanilla.name == "hf-eager"
    assert pair.difference.parts["ms"].sum() == pytest.approx(pair.difference.step.ms)


def test_a_side_held_against_itself_is_told_apart_by_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def pretend(command: list[str], *, name: str, **options: object) -> Capture:
        names.append(name)
        return bundled_pair().fused

    monkeypatch.setattr(module, "profile", pretend)
    pair = capture_pair("tiny-gpt2", "fused", "fused", output=tmp_path)
    assert list(pair.named_traces) == ["fused, first", "fused, second"]
    assert names == ["tiny-gpt2-fused-1", "tiny-gpt2-fused-2"]


def test_the_bundled_captures_are_whole_and_say_where_they_come_from() -> None:
    pair = bundled_pair()
    assert pair.decode_steps >= 8
    assert all(table.coverage > 0.8 for table in pair.tables)
    assert pair.difference.verdict is Verdict.FASTER
    assert pair.remarks[0].startswith("captures of gpt2, ")
    assert "not on this machine" in pair.remarks[0]
    assert pair.outcome.of == pair.of
    assert (pair.of["model"], pair.of["baseline"], pair.of["steps"]) == ("gpt2", "hf-eager", pair.decode_steps)
    assert TraceBench(model="tiny-gpt2", source="bundled").settings == {**pair.of, "source": "bundled"}
    assert all(side.record.tax for side in (pair.vanilla, pair.fused))


def test_where_nothing_can_be_captured_the_bundled_ones_stand_in_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise CaptureError("no room for a profiler")

    monkeypatch.setattr(module, "profile", fail)
    pair = capture_pair(output=tmp_path)
    assert "no room for a profiler" in pair.remarks[0]
    assert pair.vanilla.files == bundled_pair().vanilla.files
    with pytest.raises(CaptureError, match="no room"):
        capture_pair(output=tmp_path, source="nsys")


def test_where_the_command_fails_no_other_captures_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise CommandFailedError("unknown model 'gpt-17'", 2, None)

    monkeypatch.setattr(module, "profile", fail)
    with pytest.raises(CommandFailedError, match="gpt-17"):
        capture_pair("gpt-17", output=tmp_path, source="auto")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "got steps = 0, expected at least 1"),
        ({"source": "perf"}, "got source = 'perf', expected one of auto, nsys, torch, bundled"),
    ],
)
def test_a_pair_that_cannot_be_is_refused(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        capture_pair(output=tmp_path, **options)  # type: ignore[arg-type]


def test_what_comes_with_labkit_names_no_user_and_no_folder() -> None:
    pair = bundled_pair()
    for file in (*pair.vanilla.files, *pair.fused.files, pair.vanilla.record_file, pair.fused.record_file):
        content = file.read_bytes()
        assert not [
            text for text in (b"/home/", b"/root", b"HOME=", b"PATH=", b"USER=", b"HOSTNAME") if text in content
        ]


def test_a_pair_that_other_programs_disturbed_is_not_trusted_and_says_so() -> None:
    quiet = bundled_pair()
    assert quiet.trust.trustworthy
    disturbed = replace(quiet.fused, record=quiet.fused.record.model_copy(update={"taken_cores": 1.5}))
    pair = replace(quiet, fused=disturbed)
    assert not pair.outcome.trusted
    assert pair.outcome.grade.startswith("not trustworthy: fused: other programs used 1.5 of the processors")
    assert "not trustworthy" in pair.headline
    table = captures_table(pair).data
    assert "1.5 of the processors" in table
    assert "capture again" in table
