"""Exercise: weights in groups within a byte budget.

Only the bytes go from one process to another one, and their number is the budget.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.harness.judge.arrays import Input, JudgedCall, Result
from labkit.harness.judge.judge import answers
from labkit.harness.judge.judged_process import SubmissionError, with_numpy
from labkit.notebooks.workshop.exercises import Attempt, Remark, Report, filled, find_exercise

FILE = "quantise.py"
BITS = (4.25, 4.5, 5.0)
MATRICES, ROWS, MOST_COLUMNS = 4, 48, 4  # columns in units of 128
OUTLIERS = 0.002  # of the numbers, ten times as large
AS_GOOD = 1.03  # times the error of the solution


def parameters(rng: np.random.Generator) -> dict[str, Any]:
    return {"bits": float(rng.choice(BITS))}


def check(work: Attempt) -> Report:
    """Whether the error of the matrices, after they were stored and loaded, is nearly as small as the solution's."""
    rng, bits = work.random, work.parameters["bits"]
    matrices = [_matrix(rng) for _ in range(MATRICES)]
    exercise = find_exercise("quantise-groups")
    with TemporaryDirectory(prefix="labkit-workshop-") as temporary:
        honest = Path(temporary, FILE)
        honest.write_bytes(filled(exercise.solution / f"{FILE}.j2", work.parameters))
        best = _error(matrices, _restored(honest, matrices, bits))
    try:
        restored = _restored(work.folder / FILE, matrices, bits)
    except SubmissionError as error:
        return Report((Remark(f"{FILE}: {error}", right=False),))
    unwritten = next((index for index, matrix in enumerate(restored) if not np.isfinite(matrix).all()), None)
    if unwritten is not None:
        return Report((Remark(f"`load` leaves numbers of matrix {unwritten} unwritten, or infinite", right=False),))
    reached = _error(matrices, restored)
    words = (
        f"root mean square of the errors / that of the weights is {reached:.2%} at {bits:g} bits for each number; the "
        f"solution has {best:.2%} on these matrices, which are new in each check"
    )
    if reached <= AS_GOOD * best:
        return Report((Remark(words, right=True),))
    return Report((Remark(f"{words}{_reason(reached / best)}", right=False),))


def _matrix(rng: np.random.Generator) -> NDArray[np.float32]:
    """Weights whose groups do not lie around zero, with a few outliers."""
    columns = 128 * int(rng.integers(1, MOST_COLUMNS + 1))
    values = rng.standard_normal((ROWS, columns))
    values += 0.6 * np.repeat(rng.standard_normal((ROWS, columns // 32)), 32, axis=1)
    values *= np.where(rng.random(values.shape) < OUTLIERS, 10, 1)
    return (0.02 * values).astype(np.float32)


def _restored(file: Path, matrices: list[NDArray[np.float32]], bits: float) -> list[NDArray[np.float32]]:
    """What `load` makes of the bytes that `store` has written, each in a process of its own."""
    budgets = [Result((int(matrix.size * bits / 8),), "uint8") for matrix in matrices]
    calls = [JudgedCall((Input(matrix), budget)) for matrix, budget in zip(matrices, budgets, strict=True)]
    stored = [result for (result,) in answers(with_numpy(file, "store"), calls)]
    calls = [JudgedCall((Input(of), Result(matrix.shape))) for of, matrix in zip(stored, matrices, strict=True)]
    return [result for (result,) in answers(with_numpy(file, "load"), calls)]


def _error(matrices: list[NDArray[np.float32]], restored: list[NDArray[np.float32]]) -> float:
    """Error of all numbers relative to their size, as root mean squares."""
    squares = [
        ((matrix.astype(np.float64) - got) ** 2).sum() / (matrix.astype(np.float64) ** 2).sum()
        for matrix, got in zip(matrices, restored, strict=True)
    ]
    return float(np.sqrt(np.mean(squares)))


def _reason(times: float) -> str:
    if times > 10:
        return ": the matrices are not recognisable; are codes and scales read where they were written?"
    if times > 1.3:
        return ": too many numbers share a scale"
    return ": near; does every group use all of its codes, and the budget all of its bytes?"
