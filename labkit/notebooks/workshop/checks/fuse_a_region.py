"""Exercise: bias, residual, norm, the MLP's first matrix, bias and activation in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.harness.judge.arrays import Input, JudgedCall, Result
from labkit.harness.judge.judge import Question
from labkit.notebooks.workshop.exercises import Attempt, Report, find_exercise
from labkit.notebooks.workshop.kernel_check import Goal, Kernel, check_kernel

FILE, THREADS, GAIN = "region.cpp", 2, 1.3
CALLS, MOST_HIDDEN, MOST_INNER = 64, 150, 200  # of the checked round
TIMED, HIDDEN, INNER = 1500, 128, 128  # of the timed round, whose calls share a matrix that stays in the cache
Vector = NDArray[np.float32]


def check(attempt: Attempt) -> Report:
    """Whether sum and outputs are right, and how much is gained over the version without fusion."""
    honest = find_exercise("fuse-a-region").folder / FILE
    kernel = Kernel(FILE, "region", "p" * 9 + "ii", honest, THREADS)
    return check_kernel(attempt, kernel, draw, Goal(draw_timed, gain=GAIN))


def draw(rng: np.random.Generator) -> Sequence[Question]:
    sizes = [(int(rng.integers(2, MOST_HIDDEN)), int(rng.integers(1, MOST_INNER))) for _ in range(CALLS)]
    return [_question(rng, _weights(rng, hidden, inner)) for hidden, inner in sizes]


def draw_timed(rng: np.random.Generator) -> Sequence[Question]:
    weights = _weights(rng, HIDDEN, INNER)
    return [_question(rng, weights) for _ in range(TIMED)]


def _weights(rng: np.random.Generator, hidden: int, inner: int) -> list[Input]:
    """bias, gain, shift, the matrix and its bias."""
    scale = float(1 / np.sqrt(hidden))
    shapes = (hidden,), (hidden,), (hidden,), (inner, hidden), (inner,)
    drawn = [np.asarray(rng.standard_normal(shape) * (scale if len(shape) > 1 else 1)) for shape in shapes]
    return [Input(values.astype(np.float32)) for values in drawn]


def _question(rng: np.random.Generator, weights: list[Input]) -> Question:
    bias, gain, shift, matrix, matrix_bias = weights
    inner, hidden = matrix.values.shape
    x, residual = rng.standard_normal((2, hidden)).astype(np.float32)
    call = JudgedCall(
        (
            *(Input(x), bias, Input(residual), gain, shift, matrix, matrix_bias),
            *(Result((hidden,)), Result((inner,)), hidden, inner),
        )
    )
    of_bias, of_gain, of_shift, w, of_matrix = (of.values.astype(np.float64) for of in weights)
    summed = x + of_bias + residual.astype(np.float64)
    centred = summed - summed.mean()
    normed = centred / np.sqrt(centred.var() + 1e-5) * of_gain + of_shift
    product = w @ normed
    mistakes = {
        "the activation is missing": [summed, product + of_matrix],
        "the bias of the matrix is missing": [summed, _gelu(product)],
        "the matrix meets the sum before the norm": [summed, _gelu(w @ summed + of_matrix)],
    }
    return Question(call, [summed, _gelu(product + of_matrix)], mistakes)


def _gelu(v: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(v / 2 * (1 + np.tanh(0.7978845608 * (v + 0.044715 * v**3))))
