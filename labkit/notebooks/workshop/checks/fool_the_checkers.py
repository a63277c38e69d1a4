"""Exercise: wrong kernels that weak checkers believe, and checkers without these holes.

The learner's checkers and cheats run in one confined process. The judge knows which kernel is right, and tells it
nobody. Whether a cheat is wrong at all is judged in a process of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from labkit.harness.judge.arrays import Input, JudgedCall, Result
from labkit.harness.judge.judge import answers, conversation
from labkit.harness.judge.judged_process import Submission, SubmissionError, site_packages, with_numpy
from labkit.notebooks.workshop.exercises import Attempt, Remark, Report, find_exercise

CHECKERS = (1, 2, 3, 4)
HONEST, CHEATS = 4, {1: 2, 2: 2, 3: 1, 4: 3}  # kernels of the driver
SEEDS = 3
WRONG = 1e-3  # least error of a wrong kernel, relative to the number


@dataclass
class Trials:
    """The checks that the process has to make, and what they said."""

    tasks: Sequence[tuple[str, int, str, int, int]]  # which checkers, number, kind and index of the kernel, seed
    folders: tuple[str, str]  # of the learner's files, and of the first ones
    said: list[Any] = field(default_factory=list)  # True, False, or the error of the checker
    asked: int = 0

    def answer(self, name: str, *arguments: Any) -> Any:
        if name == "folders":
            return self.folders
        if name == "next" and self.asked < len(self.tasks):
            self.asked += 1
            return self.tasks[self.asked - 1]
        if name == "said" and len(self.said) == self.asked - 1:
            self.said.append(arguments[0])
        return None


def check(attempt: Attempt) -> Report:
    """Whether every cheat is wrong and believed, and whether the mended checkers tell right kernels from wrong ones."""
    rng, exercise = attempt.random, find_exercise("fool-the-checkers")
    tasks = _tasks(rng)
    trials = Trials(tasks, (str(attempt.folder.resolve()), str(exercise.folder)))
    driver = exercise.folder / "judge" / "driver.py"
    submission = Submission(
        driver, "run", "conversation", imports=("numpy",), readable=(*site_packages(), *trials.folders)
    )
    try:
        result = conversation(submission, trials.answer)
    except SubmissionError as error:
        return Report((Remark(str(error), right=False),))
    if isinstance(result, str) and result:
        return Report((Remark(result, right=False),))
    if len(trials.said) < len(tasks):
        return Report((Remark(f"only {len(trials.said)} of {len(tasks)} checks were made", right=False),))
    results = dict(zip(tasks, trials.said, strict=True))
    return Report(tuple(remark for number in CHECKERS for remark in _remarks(attempt, number, results)))


def _tasks(rng: np.random.Generator) -> list[tuple[str, int, str, int, int]]:
    """All checks in random order, so that their order does not say which kernels are right."""
    tasks = []
    for number in CHECKERS:
        seeds = [int(seed) for seed in rng.integers(1 << 30, size=SEEDS)]
        tasks += [("original", number, "yours", 0, seed) for seed in seeds]
        tasks += [("mended", number, "yours", 0, seed) for seed in seeds]
        tasks += [("mended", number, "honest", index, seed) for index in range(HONEST) for seed in seeds]
        tasks += [("mended", number, "cheat", index, seed) for index in range(CHEATS[number]) for seed in seeds]
    return [tasks[index] for index in rng.permutation(len(tasks))]


def _remarks(attempt: Attempt, number: int, results: dict[tuple[str, int, str, int, int], Any]) -> list[Remark]:
    """What is to be said about one checker and its cheat."""
    of = [(task, said) for task, said in results.items() if task[1] == number]
    errors = [said for _, said in of if isinstance(said, str)]
    if errors:
        return [Remark(f"checker {number}: {errors[0]}", right=False)]
    believed = all(said for task, said in of if task[0] == "original")
    cheat = f"cheat_{number}"
    if not believed:
        first = Remark(f"{cheat}: the original checker_{number} does not believe it", right=False)
    elif not _is_wrong(attempt, cheat):
        first = Remark(
            f"{cheat} is a right kernel; a cheat has to be wrong for some inputs or in some calls", right=False
        )
    else:
        first = Remark(f"{cheat} is wrong, and the original checker_{number} believes it", right=True)
    mended = [(task[2], said) for task, said in of if task[0] == "mended"]
    if not all(said for kind, said in mended if kind == "honest"):
        second = Remark(f"your checker_{number} refuses a right kernel", right=False)
    elif any(said for kind, said in mended if kind == "yours"):
        second = Remark(f"your checker_{number} believes {cheat}", right=False)
    elif any(said for kind, said in mended if kind == "cheat"):
        second = Remark(f"your checker_{number} believes another wrong kernel that uses the same hole", right=False)
    else:
        second = Remark(f"your checker_{number} believes right kernels, and none of the wrong ones", right=True)
    return [first, second]


def _is_wrong(attempt: Attempt, cheat: str) -> bool:
    """Whether a kernel gives a wrong result in one of twenty calls, or fails."""
    rng = attempt.random
    inputs = [rng.standard_normal((4, columns)).astype(np.float32) for columns in 4 * (32, 1024, 33, 32, 7)]
    calls = [JudgedCall((Input(x), Result(x.shape))) for x in inputs]
    try:
        results = [result for (result,) in answers(with_numpy(attempt.folder / "cheats.py", cheat), calls)]
    except SubmissionError:
        return True
    for x, result in zip(inputs, results, strict=True):
        exponentials = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
        right = exponentials / exponentials.sum(axis=1, keepdims=True)
        if not (np.abs(result - right) <= WRONG * right).all():
            return True
    return False
