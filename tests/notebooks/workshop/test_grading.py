"""Grades of many learners: a table that goes on where it was, and learners who cannot harm each other."""

import re
import shutil
from pathlib import Path

import pytest
from helpers.sweeps import sweep
from typer.testing import CliRunner

from labkit.cli.app import app
from labkit.notebooks.workshop import grading
from labkit.notebooks.workshop.exercises import find_exercise
from labkit.notebooks.workshop.grading import Grade, csv_of, grade, remarks, seed_of, submitted
from labkit.notebooks.workshop.learner import PROGRESS, Learner
from labkit.system.errors import UserError

LIMIT, SOFTMAX = "limit-by-hand", "online-softmax"


def solved(folder: Path, learner: str, *names: str) -> Learner:
    """A learner's folder with the solutions of these exercises."""
    yours = Learner(folder)
    for name in names:
        exercise = find_exercise(name)
        work = yours.start(exercise, learner)
        for path in yours.solve(exercise).iterdir():
            shutil.copyfile(path, work / path.name)
    return yours


def by_folder(grades: list[Grade], exercise: str) -> dict[str, Grade]:
    return {of.submission: of for of in grades if of.exercise == exercise}


def test_solutions_pass_and_what_is_missing_or_wrong_does_not(tmp_path: Path) -> None:
    root = tmp_path / "class"
    solved(root / "ada", "Ada", LIMIT)
    grace = solved(root / "grace" / "workshop", "Grace", LIMIT)
    (grace.folder / find_exercise(LIMIT).folder.name / "answers.toml").write_text("weights_mb = 1\n")
    grades = grade(root, [LIMIT, SOFTMAX], seed=1, output=tmp_path / "grades.csv")
    limits, kernels = by_folder(grades, LIMIT), by_folder(grades, SOFTMAX)
    assert limits["ada"].passed
    assert not limits["grace/workshop"].passed
    assert "weights_mb" in limits["grace/workshop"].remark
    assert {of.remark for of in kernels.values()} == {"not handed in"}


def test_a_learner_who_crashes_or_copies_another_name_harms_nobody(tmp_path: Path) -> None:
    """One progress file is damaged, one belongs to a name that another learner has, too."""
    root = tmp_path / "class"
    solved(root / "ada", "Ada", LIMIT)
    solved(root / "ada2", "ada", LIMIT)
    solved(root / "broken", "Grace", LIMIT)
    (root / "broken" / PROGRESS).write_text("{")
    grades = grade(root, [LIMIT], seed=1, output=tmp_path / "grades.csv")
    of = by_folder(grades, LIMIT)
    assert of["ada"].passed
    assert of["ada2"].passed
    assert "is not JSON" in of["broken"].remark
    notes = "\n".join(remarks(grades))
    assert "2 folders have this name: ada, ada2" in notes
    assert "the same files from ada, ada2" in notes


@sweep
def test_kernels_of_one_learner_harm_nobody_else(tmp_path: Path) -> None:
    """Each does harm before it computes. The right one comes last, on the machine that the others leave behind."""
    harm = {
        "1 endless": ("for (volatile bool on = true; on;) {}", "endless loop"),
        "2 forking": ("while (true) fork();", "started a process"),
        "3 hungry": ("while (true) std::memset(new char[1 << 26], 1, 1 << 26);", "gave up|killed|crashed"),
        "4 printing": ('while (true) std::fputs("right ", stderr);', "crashed|endless loop"),
        "5 deleting": ("if (unlink(__FILE__)) std::abort();", "gave up"),
    }
    for learner, (code, _) in harm.items():
        work = solved(tmp_path / "class" / learner, learner, SOFTMAX).folder / find_exercise(SOFTMAX).folder.name
        text = (work / "online_softmax.cpp").read_text()
        head = "#include <cstdio>\n#include <cstdlib>\n#include <cstring>\n#include <unistd.h>\n"
        begin = text.index("{", text.index("void attend")) + 1
        (work / "online_softmax.cpp").write_text(f"{head}{text[:begin]} {code} {text[begin:]}")
    solved(tmp_path / "class" / "6 honest", "Ada", SOFTMAX)
    of = by_folder(grade(tmp_path / "class", [SOFTMAX], seed=1, output=tmp_path / "grades.csv"), SOFTMAX)
    for learner, (_, reason) in harm.items():
        assert not of[learner].passed
        assert re.search(reason, of[learner].remark), of[learner].remark
        assert (tmp_path / "class" / learner / find_exercise(SOFTMAX).folder.name / "online_softmax.cpp").exists()
    assert of["6 honest"].passed, of["6 honest"].remark


def test_grading_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, table = tmp_path / "class", tmp_path / "grades.csv"
    ada, _ = solved(root / "ada", "Ada", LIMIT), solved(root / "grace", "Grace", LIMIT)
    checked: list[str] = []

    def check(work: Path, exercise: object, learner: str, seed: int) -> str:
        checked.append(learner)
        if checked == ["Ada", "Grace"]:
            raise KeyboardInterrupt
        return ""

    monkeypatch.setattr(grading, "_checked", check)
    with pytest.raises(KeyboardInterrupt):
        grade(root, [LIMIT], seed=7, output=table)
    grade(root, [LIMIT], seed=seed_of(table), output=table)
    assert checked == ["Ada", "Grace", "Grace"]
    (ada.folder / find_exercise(LIMIT).folder.name / "answers.toml").write_text("weights_mb = 1\n")
    grade(root, [LIMIT], seed=7, output=table)
    assert checked[3:] == ["Ada"]


def test_a_learner_is_checked_again_if_the_files_were_not_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that failed, and a damaged progress file that was repaired."""
    root, table, answers = tmp_path / "class", tmp_path / "grades.csv", ["the check failed: Killed", "", ""]
    solved(root / "ada", "Ada", LIMIT)
    grace = solved(root / "grace", "Grace", LIMIT)
    whole = (grace.folder / PROGRESS).read_text()
    (grace.folder / PROGRESS).write_text("{")
    monkeypatch.setattr(grading, "_checked", lambda *_: answers.pop(0))
    assert not any(each.passed for each in grade(root, [LIMIT], seed=7, output=table))
    (grace.folder / PROGRESS).write_text(whole)
    assert all(each.passed for each in grade(root, [LIMIT], seed=7, output=table))
    assert not answers


def test_links_and_huge_files_are_not_handed_in(tmp_path: Path) -> None:
    root = tmp_path / "class"
    ada = solved(root / "ada", "Ada", LIMIT)
    answers = ada.folder / find_exercise(LIMIT).folder.name / "answers.toml"
    answers.unlink()
    answers.symlink_to("/etc/passwd")
    (of,) = grade(root, [LIMIT], seed=1, output=tmp_path / "grades.csv")
    assert of.remark == "not handed in"


def test_a_folder_without_learners_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no progress.json in .* nothing to grade"):
        submitted(tmp_path)
    with pytest.raises(UserError, match="expected a folder"):
        submitted(tmp_path / "none")


def test_another_table_is_not_replaced(tmp_path: Path) -> None:
    solved(tmp_path / "class" / "ada", "Ada", LIMIT)
    other = tmp_path / "other.csv"
    other.write_text("name,age\nAda,36\n")
    with pytest.raises(UserError, match="is no table of grades"):
        grade(tmp_path / "class", [LIMIT], seed=1, output=other)
    assert other.read_text() == "name,age\nAda,36\n"


def test_the_table_is_read_back(tmp_path: Path) -> None:
    of = Grade("ada", 'Ada, "the first"', LIMIT, True, "", 1.5, 7, "abc")
    (tmp_path / "grades.csv").write_text(csv_of([of]))
    assert list(grading._read(tmp_path / "grades.csv")) == [of]


def test_the_teachers_table_fits_a_terminal_and_says_what_is_wrong(tmp_path: Path) -> None:
    root, table = tmp_path / "class", tmp_path / "grades.csv"
    solved(root / "ada", "Ada Lovelace", LIMIT)
    grace = solved(root / "grace", "Grace Hopper", LIMIT)
    (grace.folder / find_exercise(LIMIT).folder.name / "answers.toml").write_text("weights_mb = 1\n")
    command = ["workshop", "grade", str(root), "--output", str(table), "--seed", "3"]
    said = CliRunner().invoke(app, command, env={"COLUMNS": "80"}).stdout.splitlines()
    rows = {words[0]: words[-15:] for words in map(str.split, said[:6]) if words}
    assert rows["ada"] == ["+", *13 * ".", "1"]
    assert rows["grace"] == ["-", *13 * ".", "0"]
    assert any(line.startswith("grace, 1 limit-by-hand: weights_mb: ") for line in said)
    assert max(map(len, said[:8])) <= 80
