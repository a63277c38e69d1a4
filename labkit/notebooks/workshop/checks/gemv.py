"""Exercise: a matrix times a vector at the memory's rate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.harness.judge.arrays import Input, JudgedCall, Result
from labkit.harness.judge.judge import Question
from labkit.notebooks.workshop.exercises import Attempt, Report, find_exercise
from labkit.notebooks.workshop.kernel_check import Goal, Kernel, check_kernel

FILE, THREADS, SHARE = "gemv.cpp", 2, 0.8
CALLS, MOST_SIZE = 64, 200  # of the checked round; odd sizes are among them
TIMED, ROWS, COLUMNS = 16, 2048, 1024  # of the timed round: 134 MB in all, more than most caches hold


def check(work: Attempt) -> Report:
    """Whether the products are right, and how near to the memory's rate they are computed."""
    folder = find_exercise("gemv").folder
    goal = Goal(draw_timed, folder / "judge" / "reader.cpp", share=SHARE)
    return check_kernel(work, Kernel(FILE, "gemv", "pppii", folder / FILE, THREADS), draw, goal)


def draw(rng: np.random.Generator) -> Sequence[Question]:
    return [_question(rng, *(int(size) for size in rng.integers(1, MOST_SIZE, 2))) for _ in range(CALLS)]


def draw_timed(rng: np.random.Generator) -> Sequence[Question]:
    return [_question(rng, ROWS, COLUMNS) for _ in range(TIMED)]


def _question(rng: np.random.Generator, rows: int, columns: int) -> Question:
    matrix = rng.standard_normal((rows, columns), dtype=np.float32)
    vector = (rng.standard_normal(columns, dtype=np.float32) * rng.choice([1, 100])).astype(np.float32)
    call = JudgedCall((Input(matrix), Input(vector), Result((rows,)), rows, columns))
    right = matrix.astype(np.float64) @ vector
    mistakes: dict[str, list[NDArray[np.float64]]] = {}
    if rows == columns:
        mistakes["this is the product with the transposed matrix"] = [matrix.T.astype(np.float64) @ vector]
    whole = columns // 8 * 8
    if 0 < whole < columns:
        missing = [matrix[:, :whole].astype(np.float64) @ vector[:whole]]
        mistakes["the columns that are left over after whole vectors of 8 are missing"] = missing
    return Question(call, [right], mistakes)
