"""Grades of many learners: their files are checked again, with seeds of the teacher's own.

Each check runs in a process of its own, on a copy of the files, so that one learner's files can harm neither the
others' nor the teacher's. Results are kept in a CSV file after each check. Grading that was stopped goes on where it
was: files that did not change, graded with the same seed, are not graded again.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from secrets import randbits
from time import monotonic

from labkit.notebooks.workshop.exercises import Exercise, exercises, find_exercise
from labkit.notebooks.workshop.learner import PROGRESS, read_progress
from labkit.system.errors import UserError
from labkit.system.home import expanded
from labkit.system.lifetime import started
from labkit.system.progress import Progress, unheard
from labkit.system.shown import shown
from labkit.system.whole_file import write_whole

CHECK_S = 120.0  # of one exercise, at most
MOST_DEPTH = 3  # folders between the submissions and a learner's progress
MOST_BYTES = 1 << 20  # of a learner's file
NOT_HANDED_IN = "not handed in"  # the remark on an exercise without files
FAILED_CHECK, ENDLESS = "the check failed", "the check did not end"  # remarks on the check, not on the files


@dataclass(frozen=True)
class Grade:
    """The grade of one exercise of one learner."""

    submission: str  # the learner's folder, inside of the folder of submissions
    learner: str
    exercise: str
    passed: bool
    remark: str  # the first thing that is not right
    seconds: float
    seed: int
    digest: str  # of the learner's files

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        """What a check of the exercise depends on."""
        return self.submission, self.learner, self.exercise, self.seed, self.digest

    @property
    def is_final(self) -> bool:
        """Whether another check of the same files would say the same. A process that failed may run the next time."""
        return self.passed or not self.remark.startswith((FAILED_CHECK, ENDLESS))


@dataclass(frozen=True)
class Submitted:
    """A learner's folder among the submissions."""

    folder: Path
    name: str  # of the folder, inside of the folder of submissions
    learner: str
    problem: str = ""  # why it cannot be graded


def submitted(submissions: str | Path) -> list[Submitted]:
    """All learners' folders in a folder: each has a `progress.json`. UserError: no folder has one."""
    root = expanded(submissions)
    if not root.is_dir():
        raise UserError(f"got {root}, expected a folder with a learner's folder for each learner")
    folders = sorted(path.parent for depth in range(MOST_DEPTH + 1) for path in root.glob("*/" * depth + PROGRESS))
    if not folders:
        raise UserError(
            f"no {PROGRESS} in {root} or in the folders in it, so there is nothing to grade; learners hand in the "
            "folder that `labkit workshop start` made"
        )
    return [_submitted(folder, root) for folder in folders]


def _submitted(folder: Path, root: Path) -> Submitted:
    name = str(folder.relative_to(root))
    try:
        return Submitted(folder, name, read_progress(folder / PROGRESS).learner)
    except (UserError, OSError) as error:
        return Submitted(folder, name, "", str(error))


def grade(
    submissions: str | Path,
    names: Sequence[str] = (),
    *,
    seed: int,
    output: str | Path,
    progress: Progress = unheard,
) -> list[Grade]:
    """Grades the exercises of these names (none: all) of all learners, and returns their grades.

    output: a CSV file, to which every grade is written as soon as it is known.
    """
    chosen = [find_exercise(name) for name in names] or list(exercises().values())
    table = expanded(output)
    kept = {earlier.key: earlier for earlier in _read(table)} if table.exists() else {}
    grades: list[Grade] = []
    cases = [(learner, exercise) for learner in submitted(submissions) for exercise in chosen]
    for done, (learner, exercise) in enumerate(cases):
        progress(done, len(cases), f"{shown(learner.name)}: {exercise.name}")
        digest = _digest(learner.folder / exercise.folder.name, exercise)
        known = kept.get((learner.name, learner.learner, exercise.name, seed, digest))
        reused = known if known and known.is_final and not learner.problem else None
        grade_now = reused or _grade(learner, exercise, seed, digest)
        grades.append(grade_now)
        kept.pop(grade_now.key, None)
        write_whole(table, csv_of([*kept.values(), *grades]))  # grades of other files and seeds stay, above
    progress(len(cases), len(cases), "done")
    return grades


def seed_of(output: str | Path) -> int:
    """The seed of the latest grade in a table; a new one where there is no table."""
    table = expanded(output)
    seeds = [grade.seed for grade in _read(table)] if table.exists() else []
    return seeds[-1] if seeds else randbits(32)


def remarks(grades: Sequence[Grade]) -> list[str]:
    """What a teacher should look at: names that two learners share, and files that are equal."""
    by_name: dict[str, set[str]] = {}
    by_files: dict[tuple[str, str], set[str]] = {}
    for of in grades:
        by_name.setdefault(of.learner.casefold(), set()).add(of.submission)
        if of.passed:
            by_files.setdefault((of.exercise, of.digest), set()).add(of.submission)
    names = [
        f"{shown(name)}: {len(folders)} folders have this name: {', '.join(map(shown, sorted(folders)))}"
        for name, folders in by_name.items()
        if name and len(folders) > 1
    ]
    copies = [
        f"{exercise}: the same files from {', '.join(map(shown, sorted(folders)))}"
        for (exercise, _), folders in by_files.items()
        if len(folders) > 1
    ]
    return names + copies


def csv_of(grades: Sequence[Grade]) -> str:
    """Grades as the text of a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [of.name for of in fields(Grade)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(of) for of in grades)
    return text.getvalue()


def _read(path: Path) -> Iterator[Grade]:
    """The grades in a CSV file. UserError: it is another table."""
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                yield Grade(
                    **row
                    | {"passed": row["passed"] == "True", "seconds": float(row["seconds"]), "seed": int(row["seed"])}
                )  # type: ignore[arg-type]
            except (KeyError, TypeError, ValueError):
                raise UserError(f"{path} is no table of grades; name another file (--output)") from None


def _digest(work: Path, exercise: Exercise) -> str:
    """Digest of a learner's files of an exercise; empty where one is missing, is a link, or is too large."""
    digest = hashlib.sha256()
    for name in exercise.files:
        path = work / name
        if path.is_symlink() or not path.is_file() or path.stat().st_size > MOST_BYTES:
            return ""
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _grade(learner: Submitted, exercise: Exercise, seed: int, digest: str) -> Grade:
    begin = monotonic()
    remark = learner.problem or ("" if digest else NOT_HANDED_IN)
    if not remark:
        with tempfile.TemporaryDirectory(prefix="labkit-grading-") as temporary:
            for name in exercise.files:
                shutil.copyfile(learner.folder / exercise.folder.name / name, Path(temporary, name))
            remark = _checked(Path(temporary), exercise, learner.learner, seed)
    return Grade(
        learner.name, learner.learner, exercise.name, not remark, remark, round(monotonic() - begin, 1), seed, digest
    )


def _checked(work: Path, exercise: Exercise, learner: str, seed: int) -> str:
    """The first remark that is not right, from a process of its own; empty: everything is right."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "labkit.notebooks.workshop.check_once",
        str(work),
        exercise.name,
        learner,
        str(seed),
    ]
    with started(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            said, errors = process.communicate(timeout=CHECK_S)
        except subprocess.TimeoutExpired:
            return f"{ENDLESS} within {CHECK_S:.0f} s"
    if process.returncode:
        return f"{FAILED_CHECK}: {(errors.strip().splitlines() or ['without a word'])[-1]}"
    return str(json.loads(said.splitlines()[-1])["remark"])
