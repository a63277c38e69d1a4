"""Exercises from a cell of their notebook."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from IPython.display import Markdown

from labkit.notebooks.workshop.exercises import Exercise, find_exercise
from labkit.notebooks.workshop.learner import FOLDER, PROGRESS, Learner
from labkit.system.markdown import as_text, markdown_table

NAME_IN_TICKS = re.compile(r"\\`([\w.]+)\\`")  # in an escaped text


@dataclass(frozen=True)
class ExerciseCell:
    """An exercise in the learner's folder. As the value of a cell it shows the task's numbers and files."""

    exercise: Exercise
    learner: Learner

    def check(self, seed: int | None = None) -> Markdown:
        """What is right and what is wrong in the learner's files, which are saved first."""
        report = self.learner.check(self.exercise, seed)
        lines = [f"- **{'right' if of.right else 'not yet'}**: {_remark(of.text)}" for of in report.remarks]
        return Markdown("\n".join(lines))

    def hint(self) -> Markdown:
        """The next hint."""
        text, number, count = self.learner.hint(self.exercise)
        return Markdown(f"Hint {number} of {count}: {text}")

    def _repr_markdown_(self) -> str:
        progress = self.learner.progress
        numbers = self.exercise.numbers(progress.learner) if progress else {}
        rows = {
            "your files": ", ".join(f"`{name}`" for name in self.exercise.files),
            "minutes": str(self.exercise.minutes),
            **({"needs": self.exercise.needs} if self.exercise.needs else {}),
            **{label: as_text(value) for label, value in numbers.items()},
        }
        return markdown_table(("", as_text(self.exercise.name)), rows.items())


def _remark(text: str) -> str:
    """A remark as Markdown: names in backticks are code, and no other part is markup."""
    return NAME_IN_TICKS.sub(r"`\1`", as_text(text))


def exercise(name: str, folder: str | Path | None = None) -> ExerciseCell:
    """The exercise of this name or number. It is started if it was not.

    folder: of the learner; None: the one in which this notebook lies, else `workshop` in the current folder.
    """
    parent = Path.cwd().parent
    known = parent if (parent / PROGRESS).exists() else Path(FOLDER)
    of = ExerciseCell(find_exercise(name), Learner(known if folder is None else folder))
    of.learner.start(of.exercise)
    return of
