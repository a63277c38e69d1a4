"""Exercise: a layer cut over ranks. Each rank has a process of its own, which holds only its part of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.harness.judge.arrays import Input, JudgedCall, Result
from labkit.harness.judge.judge import answers
from labkit.harness.judge.judged_process import SubmissionError, with_numpy
from labkit.notebooks.workshop.exercises import Attempt, Remark, Report

FILE = "cut.py"
ALLOWED = 1e-4  # error relative to the largest number of a result
Matrix = NDArray[Any]


def parameters(rng: np.random.Generator) -> dict[str, Any]:
    return {"ranks": int(rng.choice([2, 3, 4]))}


@dataclass(frozen=True)
class Layer:
    """A layer with random weights, in float32."""

    heads: int
    width: int
    weights: Mapping[str, Matrix]

    @classmethod
    def drawn(cls, rng: np.random.Generator, ranks: int) -> Layer:
        heads, width, inner = ranks * int(rng.integers(1, 4)), int(rng.integers(3, 9)), ranks * int(rng.integers(2, 9))
        hidden, columns = int(rng.integers(8, 33)), heads * width
        shapes: dict[str, tuple[int, ...]] = {"q": (hidden, columns), "k": (hidden, columns), "v": (hidden, columns)}
        shapes |= {"o": (columns, hidden), "up": (hidden, inner), "up_bias": (inner,)}
        shapes |= {"down": (inner, hidden), "down_bias": (hidden,)}
        weights = {name: (rng.standard_normal(shape) / 3).astype(np.float32) for name, shape in shapes.items()}
        return cls(heads, width, weights)

    @property
    def inner(self) -> int:
        return int(self.weights["up"].shape[1])

    def room(self, ranks: int) -> int:
        """Numbers that a rank may keep."""
        bias = self.weights["down_bias"].size
        return (sum(of.size for of in self.weights.values()) - bias) // ranks + bias

    def attention(self, x: Matrix) -> Matrix:
        w = {name: of.astype(np.float64) for name, of in self.weights.items()}
        out = np.zeros((len(x), w["o"].shape[1]))
        for head in range(self.heads):
            own = slice(head * self.width, (head + 1) * self.width)
            scores = (x @ w["q"][:, own]) @ (x @ w["k"][:, own]).T / np.sqrt(self.width)
            scores[np.triu_indices(len(x), 1)] = -np.inf
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            out += shares / shares.sum(axis=1, keepdims=True) @ (x @ w["v"][:, own]) @ w["o"][own]
        return out

    def mlp(self, y: Matrix) -> Matrix:
        w = {name: of.astype(np.float64) for name, of in self.weights.items()}
        return np.asarray(np.maximum(y @ w["up"] + w["up_bias"], 0) @ w["down"] + w["down_bias"])


def check(work: Attempt) -> Report:
    """Whether the sums over all ranks are the outputs of the whole layer."""
    rng, ranks, file = work.random, work.parameters["ranks"], work.folder / FILE
    layer = Layer.drawn(rng, ranks)
    x = rng.standard_normal((int(rng.integers(2, 9)), layer.weights["q"].shape[0])).astype(np.float32)
    try:
        mine = _cut(file, layer, ranks)
        after_attention = _sum(file, "attention", layer, x, mine)
        y = (x + layer.attention(x)).astype(np.float32)
        after_mlp = _sum(file, "mlp", layer, y, mine)
    except SubmissionError as error:
        return Report((Remark(f"{FILE}: {error}", right=False),))
    bias = layer.weights["down_bias"]
    return Report(
        (
            Remark(f"each of {ranks} ranks has room for {layer.room(ranks)} numbers", right=True),
            _compared("attention", after_attention, layer.attention(x), {}),
            _compared(
                "mlp",
                after_mlp,
                layer.mlp(y),
                {
                    "every rank adds down_bias, so it is in the sum once for each": layer.mlp(y) + (ranks - 1) * bias,
                    "down_bias is missing": layer.mlp(y) - bias,
                },
            ),
        )
    )


def _cut(file: Path, layer: Layer, ranks: int) -> list[Matrix]:
    """Each rank's part of the weights."""
    weights = [Input(of) for of in layer.weights.values()]
    calls = [JudgedCall((rank, ranks, layer.heads, *weights, Result((layer.room(ranks),)))) for rank in range(ranks)]
    return [mine for (mine,) in answers(with_numpy(file, "cut"), calls)]


def _sum(file: Path, function: str, layer: Layer, rows: Matrix, mine: list[Matrix]) -> Matrix:
    """The sum of what the ranks write, each in a process of its own."""
    parts = []
    for rank, part in enumerate(mine):
        sizes = (rank, len(mine), layer.heads, layer.width, layer.inner)
        call = JudgedCall((*sizes, Input(rows), Input(part), Result(rows.shape)))
        ((result,),) = answers(with_numpy(file, function), [call])
        parts.append(result.astype(np.float64))
    return np.asarray(sum(parts))


def _compared(name: str, got: Matrix, right: Matrix, mistakes: Mapping[str, Matrix]) -> Remark:
    most = ALLOWED * float(np.abs(right).max())
    if (np.abs(got - right) <= most).all():
        return Remark(f"{name}: the sum over the ranks is the output of the whole layer", right=True)
    for sentence, wrong in mistakes.items():
        if (np.abs(got - wrong) <= most).all():
            return Remark(f"{name}: {sentence}", right=False)
    token, column = (int(i) for i in np.argwhere(~(np.abs(got - right) <= most))[0])
    return Remark(
        f"{name}: the sum at token {token}, column {column} is {got[token, column]:.5g}, expected "
        f"{right[token, column]:.5g}",
        right=False,
    )
