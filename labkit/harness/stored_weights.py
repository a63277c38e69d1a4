"""How a side keeps its matrices where a torch dtype does not say it: few bits a number, in blocks that share scales."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from pydantic import ConfigDict

from labkit.engine import InferenceEngine
from labkit.engine.engine import FusedEngine
from labkit.kernels.decode_step.weights import ModelWeights
from labkit.kernels.types import Linear
from labkit.models.dtypes import DTYPES
from labkit.system.validation import Listed
from labkit.weights.records import Outside, matrices_of


class StoredWeights(Listed):
    """A type of weights by the name that its library gives it, and what it takes of the memory.

    bits: of a number in the layers' matrices, with its share of the scales, on average. head: the type of the LM head,
    by name, and `head_bits` those of a number in it. computes: the torch dtype that serves prompts. bytes: of all
    matrices; None: not known, and counted as if what lies outside the layers were stored as the head is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    bits: float
    head: str
    head_bits: float
    computes: str
    bytes: int | None = None

    def __str__(self) -> str:
        return self.name if self.head == self.name else f"{self.name}, LM head {self.head}"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.computes]


Weights = torch.dtype | StoredWeights


def name_of(weights: Weights) -> str:
    """As records have it: "bfloat16", "int8", "Q4_0"."""
    return weights.name if isinstance(weights, StoredWeights) else str(weights).removeprefix("torch.")


def told(weights: Weights) -> str:
    """In full, for people: "int4-32, LM head int8-32"."""
    return str(weights) if isinstance(weights, StoredWeights) else name_of(weights)


def as_plain(weights: Weights) -> str | dict[str, Any]:
    """As JSON carries it from process to process."""
    return weights.model_dump() if isinstance(weights, StoredWeights) else name_of(weights)


def from_plain(told: str | dict[str, Any]) -> Weights:
    """What `as_plain` was given."""
    return DTYPES[told] if isinstance(told, str) else StoredWeights.model_validate(told)


def stored_by(engine: InferenceEngine) -> Weights:
    """How an engine keeps the weights that it has packed."""
    if not isinstance(engine, FusedEngine):
        return engine.dtype
    weights = engine.weights
    layers = [matrix for layer in weights.layers for matrix in matrices_of(layer).values()]
    head = [weights.head.matrix] if weights.head else layers
    if all(matrix.scales is None for matrix in (*layers, *head)):
        return engine.dtype
    return StoredWeights(
        name=_kind(layers),
        bits=_bits(layers),
        head=_kind(head),
        head_bits=_bits(head),
        computes="int8",
        bytes=matrix_bytes(weights) if engine.options.tensor_parallel.ranks == 1 else None,
    )


def matrix_bytes(weights: ModelWeights) -> int:
    """Bytes of the packed matrices and their scales; a tied head counts once."""
    outside = Outside(weights.embedding, None, weights.head).matrices()
    every = [*outside.values(), *(matrix for layer in weights.layers for matrix in matrices_of(layer).values())]
    return sum(matrix.weight.nbytes + (0 if matrix.scales is None else matrix.scales.nbytes) for matrix in every)


def _kind_of(matrix: Linear) -> str:
    """A name as in `labkit.weights.precision`: "bfloat16", "int8", "int4-32"."""
    if matrix.scales is None:
        return matrix.weight_type
    group = "row" if matrix.group >= matrix.inputs else str(matrix.group)
    shown = f"int{matrix.bits}" + ("" if (matrix.bits, group) == (8, "row") else f"-{group}")
    usual = matrix.asymmetric == (matrix.bits == 4)
    return shown if usual else shown + ("-asymmetric" if matrix.asymmetric else "-symmetric")


def _kind(matrices: list[Linear]) -> str:
    """Of most of their numbers."""
    numbers: Counter[str] = Counter()
    for matrix in matrices:
        numbers[_kind_of(matrix)] += matrix.outputs * matrix.inputs
    return numbers.most_common(1)[0][0]


def _bits(matrices: list[Linear]) -> float:
    """Of a number with its share of the scales, without what the layout pads."""
    stored = sum(matrix.outputs * _row_bits(matrix) for matrix in matrices)
    return stored / sum(matrix.outputs * matrix.inputs for matrix in matrices)


def _row_bits(matrix: Linear) -> int:
    if matrix.scales is None:
        return 8 * matrix.inputs * matrix.weight.itemsize
    _, groups, numbers, *_ = matrix.scales.shape  # of either layout
    return matrix.inputs * matrix.bits + 8 * matrix.scales.itemsize * groups * numbers
