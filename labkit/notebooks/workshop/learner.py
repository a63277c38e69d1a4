"""A learner's folder: files of the exercises that were started, and how far each of them is.

The folder holds `progress.json`: the learner's name, from which the parameters of all exercises are drawn, and a line
for each exercise.
"""

from __future__ import annotations

import getpass
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from secrets import randbits
from typing import Any

from labkit.notebooks.workshop.exercises import SOLUTION, Attempt, Exercise, Report, filled
from labkit.system.errors import UserError
from labkit.system.file_lock import one_process
from labkit.system.home import expanded
from labkit.system.json_file import read_json
from labkit.system.output_folder import check_output_folder
from labkit.system.whole_file import whole_file, write_whole

FOLDER = "workshop"  # in the current folder
PROGRESS = "progress.json"
SCHEMA_VERSION = 1
MOST_NAME = 100  # characters
LOCK_S = 10.0  # a process that holds the lock for longer hangs


@dataclass(frozen=True)
class State:
    """How far a learner is with an exercise. Times are ISO 8601, in UTC."""

    started: str
    checks: int = 0
    hints: int = 0  # shown so far
    passed: str = ""  # when it was first right; empty: not yet


@dataclass(frozen=True)
class Progress:
    """A learner's progress."""

    learner: str
    exercises: dict[str, State] = field(default_factory=dict)

    def with_state(self, name: str, state: State) -> Progress:
        return replace(self, exercises={**self.exercises, name: state})


class Learner:
    """A learner's folder. It is made when the first exercise is started."""

    def __init__(self, folder: str | Path = FOLDER) -> None:
        self.folder = expanded(folder)

    @property
    def progress(self) -> Progress | None:
        """The progress; None: nothing was started in this folder. UserError: its file is damaged, or of another
        version of labkit.
        """
        path = self.folder / PROGRESS
        if not path.exists():
            return None
        return read_progress(path)

    def start(self, exercise: Exercise, name: str | None = None) -> Path:
        """Copies the files of an exercise that are not there yet. Returns their folder.

        name: of the learner; None: the one that is known, else the name of the user. UserError: the folder belongs to
        somebody else, or cannot be written.
        """
        check_output_folder(self.folder, what="exercises", option="--folder")
        work = self.folder / exercise.folder.name

        def begun(progress: Progress | None) -> Progress:
            progress = progress or Progress(_checked_name(name or _user()))
            if name is not None and _checked_name(name) != progress.learner:
                raise UserError(
                    f"got the learner {name!r}; the exercises in {self.folder} belong to {progress.learner!r}: name "
                    "another folder (--folder)"
                )
            return progress.with_state(exercise.name, progress.exercises.get(exercise.name) or State(_now()))

        progress = self._changed(begun)
        parameters = exercise.parameters(progress.learner)
        for target, source in exercise.starting_files(parameters).items():
            if (work / target).exists():
                continue
            with whole_file(work / target) as path:
                path.write_bytes(filled(source, parameters))
        return work

    def check(self, exercise: Exercise, seed: int | None = None) -> Report:
        """Checks an exercise and notes the result. `seed`: of what the check draws; None: a new one."""
        progress = self._started(exercise)
        work = Attempt(
            self.folder / exercise.folder.name,
            exercise.parameters(progress.learner),
            randbits(64) if seed is None else seed,
        )
        report = exercise.check(work)

        def noted(state: State) -> State:
            passed = state.passed or (_now() if report.passed else "")
            return replace(state, checks=state.checks + 1, passed=passed)

        self._note(exercise, noted)
        return report

    def hint(self, exercise: Exercise) -> tuple[str, int, int]:
        """The next hint, its number and the number of hints. After the last one it is the last one again."""
        self._started(exercise)
        hints = exercise.hints
        state = self._note(exercise, lambda state: replace(state, hints=min(state.hints + 1, len(hints))))
        return hints[state.hints - 1], state.hints, len(hints)

    def solve(self, exercise: Exercise) -> Path:
        """Copies the solution next to the learner's files. Returns its folder."""
        parameters = exercise.parameters(self._started(exercise).learner)
        target = self.folder / exercise.folder.name / SOLUTION
        for name, contents in exercise.solution_files(parameters).items():
            with whole_file(target / name) as path:
                path.write_bytes(contents)
        return target

    def _started(self, exercise: Exercise) -> Progress:
        progress = self.progress
        if progress is None or exercise.name not in progress.exercises:
            raise UserError(
                f"the exercise {exercise.name} was not started in {self.folder}; start it: labkit workshop start "
                f"{exercise.name}"
            )
        return progress

    def _note(self, exercise: Exercise, change: Callable[[State], State]) -> State:
        def changed(progress: Progress | None) -> Progress:
            progress = progress or self._started(exercise)
            return progress.with_state(exercise.name, change(progress.exercises[exercise.name]))

        return self._changed(changed).exercises[exercise.name]

    def _changed(self, change: Callable[[Progress | None], Progress]) -> Progress:
        """Reads, changes and writes the progress, while no other process does."""
        with one_process(self.folder / f".{PROGRESS}.lock", LOCK_S):
            progress = change(self.progress)
            states = {name: asdict(state) for name, state in progress.exercises.items()}
            record = {"schema_version": SCHEMA_VERSION, "learner": progress.learner, "exercises": states}
            write_whole(self.folder / PROGRESS, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        return progress


def read_progress(path: Path) -> Progress:
    """The progress in a file. UserError: it is damaged, or of another version of labkit."""
    record = read_json(path, "a learner's progress")
    remedy = "move it away, and start the exercises again: your files stay"
    if not isinstance(record, dict) or not isinstance(version := record.get("schema_version"), int):
        raise UserError(f"{path} is no learner's progress; {remedy}")
    if version != SCHEMA_VERSION:
        raise UserError(f"{path} has version {version} of the progress, expected {SCHEMA_VERSION}; {remedy}")
    try:
        states = {str(name): _state(state) for name, state in record["exercises"].items()}
        return Progress(_checked_name(record["learner"]), states)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); {remedy}") from None


def _state(record: Any) -> State:
    state = State(**record)
    if not (isinstance(state.started, str) and isinstance(state.passed, str)):
        raise ValueError("a time that is no text")
    if not all(type(count) is int and count >= 0 for count in (state.checks, state.hints)):
        raise ValueError("a count that is none")
    return state


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name.strip() or len(name) > MOST_NAME:
        raise UserError(f"got a learner's name of {name!r:.40}, expected a text of at most {MOST_NAME} characters")
    return name.strip()


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "learner"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
