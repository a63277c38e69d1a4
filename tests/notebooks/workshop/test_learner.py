"""A learner's folder: what is copied, what stays, and how far the learner is."""

import json
from pathlib import Path

import pytest
from helpers.processes.command_line import command_line

from labkit.kernels import build
from labkit.notebooks.workshop import learner as module
from labkit.notebooks.workshop.exercises import Remark, Report, exercises, find_exercise
from labkit.notebooks.workshop.learner import PROGRESS, Learner, read_progress
from labkit.system.errors import UserError

LIMIT = "limit-by-hand"


def test_exercises_are_numbered_and_whole() -> None:
    of = exercises()
    numbers = [exercise.number for exercise in of.values()]
    assert numbers == sorted(set(numbers))
    for exercise in of.values():
        assert exercise.question.endswith("?")
        assert exercise.hints
        assert set(exercise.files) <= set(exercise.starting_files(exercise.parameters("Ada")))
        assert exercise.solution.is_dir()


@pytest.mark.parametrize("name", ["1", "limit-by-hand", "01-limit-by-hand", " limit-by-hand "])
def test_an_exercise_is_found_by_name_and_number(name: str) -> None:
    assert find_exercise(name).name == LIMIT


def test_an_unknown_exercise_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"got the exercise 'limit-by-hnd'.*limit-by-hand"):
        find_exercise("limit-by-hnd")


def test_files_that_are_there_stay(tmp_path: Path) -> None:
    learner, exercise = Learner(tmp_path / "mine"), find_exercise(LIMIT)
    work = learner.start(exercise, "Ada")
    (work / "answers.toml").write_text("weights_mb = 1\n")
    assert learner.start(exercise) == work
    assert (work / "answers.toml").read_text() == "weights_mb = 1\n"


def test_two_learners_get_different_numbers_and_one_learner_always_the_same(tmp_path: Path) -> None:
    exercise = find_exercise(LIMIT)
    files = [
        (Learner(tmp_path / folder).start(exercise, name) / "answers.toml").read_text()
        for folder, name in (("one", "Ada"), ("two", "Grace"), ("three", " ada "))
    ]
    assert files[0] != files[1]
    assert files[0] == files[2]


def test_a_folder_belongs_to_one_learner(tmp_path: Path) -> None:
    learner = Learner(tmp_path)
    learner.start(find_exercise(LIMIT), "Ada")
    with pytest.raises(UserError, match="belong to 'Ada': name another folder"):
        learner.start(find_exercise("online-softmax"), "Grace")


def test_hints_come_in_steps_and_the_last_one_stays(tmp_path: Path) -> None:
    learner, exercise = Learner(tmp_path), find_exercise(LIMIT)
    learner.start(exercise)
    count = len(exercise.hints)
    shown = [learner.hint(exercise) for _ in range(count + 1)]
    assert [number for _, number, _ in shown] == [*range(1, count + 1), count]
    assert [text for text, _, _ in shown] == [*exercise.hints, exercise.hints[-1]]


def test_an_exercise_that_was_not_started_is_not_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="start it: labkit workshop start limit-by-hand"):
        Learner(tmp_path).check(find_exercise(LIMIT))


def test_a_solved_exercise_stays_solved(tmp_path: Path) -> None:
    learner, exercise = Learner(tmp_path), find_exercise(LIMIT)
    work = learner.start(exercise, "Ada")
    solution = (learner.solve(exercise) / "answers.toml").read_text()
    (work / "answers.toml").write_text(solution)
    assert learner.check(exercise).passed
    (work / "answers.toml").write_text("weights_mb = 1\n")
    assert not learner.check(exercise).passed
    progress = learner.progress
    assert progress is not None
    assert progress.exercises[LIMIT].checks == 2
    assert progress.exercises[LIMIT].passed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema_version": 7, "learner": "Ada", "exercises": {}}', "has version 7 of the progress, expected 1"),
        ("[]", "is no learner's progress"),
        ("{", "is not JSON"),
        ('{"schema_version": 1, "learner": 3, "exercises": {}}', "is damaged"),
        ('{"schema_version": 1, "learner": "Ada", "exercises": {"gemv": {"checks": 1}}}', "is damaged"),
        ('{"schema_version": 1, "learner": "Ada", "exercises": {"gemv": {"started": "", "checks": -1}}}', "is damaged"),
        ('{"schema_version": 1, "learner": "Ada"}', "is damaged"),
    ],
)
def test_a_damaged_progress_is_refused_and_kept(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / PROGRESS).write_text(content)
    with pytest.raises(UserError, match=message):
        Learner(tmp_path).start(find_exercise(LIMIT))
    assert (tmp_path / PROGRESS).read_text() == content


def test_the_progress_is_read_back(tmp_path: Path) -> None:
    learner = Learner(tmp_path)
    learner.start(find_exercise(LIMIT), "Ada Lovelace")
    assert read_progress(tmp_path / PROGRESS) == learner.progress
    assert json.loads((tmp_path / PROGRESS).read_text())["learner"] == "Ada Lovelace"


def test_a_clock_that_was_set_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instants = iter(f"{year}-01-01T00:00:00+00:00" for year in (2026, 1970, 1999))
    monkeypatch.setattr(module, "_now", lambda: next(instants))
    learner, exercise = Learner(tmp_path), find_exercise(LIMIT)
    work = learner.start(exercise, "Ada")
    (work / "answers.toml").write_text((learner.solve(exercise) / "answers.toml").read_text())
    assert learner.check(exercise).passed
    assert learner.start(exercise) == work
    progress = read_progress(tmp_path / PROGRESS)
    assert (progress.exercises[LIMIT].started[:4], progress.exercises[LIMIT].passed[:4]) == ("2026", "1970")


@pytest.mark.parametrize("folder", ["/proc/workshop", "/dev/null", "/dev/null/workshop"])
def test_a_folder_that_cannot_be_written_is_refused(folder: str) -> None:
    with pytest.raises(UserError, match="--folder"):
        Learner(folder).start(find_exercise(LIMIT), "Ada")


def test_a_report_without_remarks_is_not_passed() -> None:
    assert not Report(()).passed
    assert Report((Remark("yes", right=True),)).passed
    assert not Report((Remark("yes", right=True), Remark("no", right=False))).passed


def test_start_compiles_the_kernels_that_the_first_check_would_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exercise begins even if they cannot be compiled."""
    compiled: list[str] = []

    def fail(weight_type: str) -> Path:
        compiled.append(weight_type)
        raise build.BuildError("no compiler")

    monkeypatch.setattr(build, "compile_library", fail)
    labkit = command_line(monkeypatch, capsys)
    code, output, _ = labkit("workshop", "start", "predict-then-measure", "--folder", str(tmp_path))
    assert code == 0
    assert compiled == ["float32"]
    assert "half a minute, once" in output
    assert (tmp_path / "02-predict-then-measure" / "answers.toml").exists()
    _, output, _ = labkit("workshop", "start", "limit-by-hand", "--folder", str(tmp_path))
    assert "compiling" not in output
