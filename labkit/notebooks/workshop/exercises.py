"""The exercises of the workshop. A folder of `notebooks/workshop/` is an exercise, with everything that belongs to it:

- exercise.toml: the question, the minutes, the files that the learner edits
- exercise.ipynb: the text
- hints.md: hints in steps, with a line of dashes between them
- solution/: the files as they may look at the end
- all other files are what the learner starts with; in a file that ends with .j2 the learner's parameters are filled in

The check is the function `check` of the module in `labkit.notebooks.workshop.checks` that has the exercise's name. The
module may also have these functions:

- parameters: draws the numbers in a learner's task
- captures: the names of captures in `profiles/captures/`, by the name of the learner's copy
- solved: more values for the templates of the solution
- prepare: what the first check would wait for, such as compiling kernels
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from labkit.system.carried import carried
from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean

ABOUT, TEXT, HINTS, SOLUTION, TEMPLATE = "exercise.toml", "exercise.ipynb", "hints.md", "solution", ".j2"
STEP = "\n---\n"  # between two hints


@dataclass(frozen=True)
class Remark:
    """A sentence about one part of an answer."""

    text: str
    right: bool


@dataclass(frozen=True)
class Report:
    """What a check says."""

    remarks: tuple[Remark, ...]

    @property
    def passed(self) -> bool:
        return bool(self.remarks) and all(remark.right for remark in self.remarks)

    def __str__(self) -> str:
        return "\n".join(f"{'right' if remark.right else 'not yet'}: {remark.text}" for remark in self.remarks)


@dataclass(frozen=True)
class Attempt:
    """A learner's files of one exercise, and the numbers that were drawn for it.

    parameters: the values in the learner's task, as `Exercise.parameters` draws them.
    seed: of what the check draws anew.
    """

    folder: Path
    parameters: Mapping[str, Any]
    seed: int

    @property
    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)


@dataclass(frozen=True)
class Exercise:
    """An exercise of the workshop."""

    folder: Path  # named after number and name: "06-online-softmax"
    question: str
    minutes: int
    files: tuple[str, ...]  # that the learner edits
    needs: str = ""  # besides labkit

    @property
    def number(self) -> int:
        return int(self.folder.name.partition("-")[0])

    @property
    def name(self) -> str:
        return self.folder.name.partition("-")[2]

    @property
    def hints(self) -> tuple[str, ...]:
        text = (self.folder / HINTS).read_text(encoding="utf-8")
        return tuple(step.strip() for step in text.split(STEP))

    @property
    def solution(self) -> Path:
        """The folder of the solution."""
        return self.folder / SOLUTION

    def starting_files(self, parameters: Mapping[str, Any]) -> dict[str, Path]:
        """The files that a learner with these parameters starts with, by the name that they get."""
        chosen: dict[str, str] = self._optional("captures", parameters)
        folder = carried("profiles/captures")
        return files_in(self.folder, without=(ABOUT, HINTS)) | {name: folder / of for name, of in chosen.items()}

    def parameters(self, learner: str) -> dict[str, Any]:
        """The values in the task of a learner: the same for the same name."""
        seed = [self.number, *learner.strip().casefold().encode()]
        return self._optional("parameters", np.random.default_rng(seed))

    def numbers(self, learner: str) -> dict[str, str]:
        """The values in the task of a learner, for people, by what they are."""
        return {_label(name): str(value) for name, value in self.parameters(learner).items()}

    def solution_files(self, parameters: Mapping[str, Any]) -> dict[str, bytes]:
        """The files of the solution for a learner with these parameters, by name."""
        values = {**parameters, **self._optional("solved", parameters)}
        return {name: filled(source, values) for name, source in files_in(self.solution).items()}

    @property
    def prepare(self) -> Callable[[], None] | None:
        """Does what the first check would wait for; None: there is nothing of the kind."""
        found: Callable[[], None] | None = getattr(self._module, "prepare", None)
        return found

    def check(self, work: Attempt) -> Report:
        """What is right and what is wrong in a learner's files."""
        missing = [name for name in self.files if not (work.folder / name).is_file()]
        if missing:
            return Report((Remark(f"{', '.join(missing)} is missing in {work.folder}", right=False),))
        report: Report = self._module.check(work)
        return report

    def _optional(self, function: str, argument: object) -> dict[str, Any]:
        """The result of a function that the module of the check may have."""
        call: Callable[[object], dict[str, Any]] | None = getattr(self._module, function, None)
        return {} if call is None else call(argument)

    @property
    def _module(self) -> Any:
        return import_module(f"labkit.notebooks.workshop.checks.{self.name.replace('-', '_')}")


def _label(parameter: str) -> str:
    return parameter.replace("gb_s", "GB/s").replace("gflops", "GFLOP/s").replace("_", " ")


def files_in(folder: Path, without: Sequence[str] = ()) -> dict[str, Path]:
    """The files in a folder by the name that a learner's copy gets."""
    return {
        path.name.removesuffix(TEMPLATE): path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name not in without and not path.name.startswith(".")
    }


def _rate_here() -> float:
    """GB/s that the memory of this machine gives now."""
    from labkit.engine.team_size import team_size
    from labkit.harness.roofline import probe_bandwidth

    return probe_bandwidth(team_size()) or 20.0


def filled(source: Path, parameters: Mapping[str, Any]) -> bytes:
    """A file for the learner: a template with the learner's parameters, or a copy."""
    if not source.name.endswith(TEMPLATE):
        return source.read_bytes()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    environment.globals["gb_s_here"] = _rate_here
    return environment.from_string(source.read_text(encoding="utf-8")).render(parameters).encode()


@cache
def exercises() -> dict[str, Exercise]:
    """All exercises by name, in order."""
    folders = sorted(path.parent for path in carried("notebooks/workshop").glob(f"*/{ABOUT}"))
    read = [_read(folder) for folder in folders]
    return {exercise.name: exercise for exercise in read}


def _read(folder: Path) -> Exercise:
    about = tomllib.loads((folder / ABOUT).read_text(encoding="utf-8"))
    return Exercise(folder, **about | {"files": tuple(about["files"])})


def find_exercise(name: str) -> Exercise:
    """The exercise of this name or number. UserError: no exercise has it."""
    known = exercises()
    for exercise in known.values():
        if name.strip() in (exercise.name, str(exercise.number), exercise.folder.name):
            return exercise
    raise UserError(
        f"got the exercise {name!r}{did_you_mean(name, known)}; expected one of {', '.join(known)}, or a number"
    )
