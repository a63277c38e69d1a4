"""Storage of matrices that no torch dtype describes: few bits per number, in blocks that share scales."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from labkit.engine import InferenceEngine
from labkit.engine.engine import FusedEngine, InjectedEngine
from labkit.engine.injected.modules import packed_matrices
from labkit.harness.frozen_record import FrozenRecord
from labkit.kernels.decode_step.weights import ModelWeights
from labkit.kernels.types import Linear
from labkit.models.dtypes import DTYPES
from labkit.weights.matrices import Outside


class StoredWeights(FrozenRecord):
    """A type of stored weights and its size in memory."""

    name: str  # as the library calls it
    bits: float  # of a number in the layers' matrices, with its share of the scales; the average
    head: str  # type of the LM head
    head_bits: float  # of a number in the LM head
    computes: str  # torch dtype in which prompts are computed
    bytes: int | None = None  # of all matrices; None: unknown, and matrices outside of the layers count as the head

    def __str__(self) -> str:
        return self.name if self.head == self.name else f"{self.name}, LM head {self.head}"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.computes]


Weights = torch.dtype | StoredWeights


def name_of(weights: Weights) -> str:
    """Name in records: "bfloat16", "int8", "Q4_0"."""
    return weights.name if isinstance(weights, StoredWeights) else str(weights).removeprefix("torch.")


def weights_text(weights: Weights) -> str:
    """Name in full, for people: "int4-32, LM head int8-32"."""
    return str(weights) if isinstance(weights, StoredWeights) else name_of(weights)


def as_plain(weights: Weights) -> str | dict[str, Any]:
    """JSON value that carries the type from process to process."""
    return weights.model_dump() if isinstance(weights, StoredWeights) else name_of(weights)


def from_plain(plain: str | dict[str, Any]) -> Weights:
    """The type that `as_plain` turned into a JSON value."""
    return DTYPES[plain] if isinstance(plain, str) else StoredWeights.model_validate(plain)


def stored_by(engine: InferenceEngine) -> Weights:
    """The type of an engine's packed weights."""
    if isinstance(engine, InjectedEngine):
        layers, head = packed_matrices(engine.module)
        whole: int | None = packed_bytes(engine)
    elif isinstance(engine, FusedEngine):
        weights = engine.weights
        layers = [matrix for layer in weights.layers for matrix in layer.matrices.values()]
        head = [weights.head.matrix] if weights.head else layers
        whole = matrix_bytes(weights) if engine.options.tensor_parallel.ranks == 1 else None
    else:
        return engine.dtype
    if all(matrix.scales is None for matrix in (*layers, *head)):
        return engine.dtype
    return StoredWeights(
        name=_kind(layers),
        bits=_bits(layers),
        head=_kind(head),
        head_bits=_bits(head),
        computes="int8",
        bytes=whole,
    )


def packed_bytes(engine: InferenceEngine) -> int:
    """Bytes of the matrices that an engine of the fused kernels, or of hooks, has packed, and of their scales."""
    if isinstance(engine, InjectedEngine):
        layers, head = packed_matrices(engine.module)
        return sum(map(_bytes, {id(matrix): matrix for matrix in (*layers, *head)}.values()))
    return matrix_bytes(engine.weights)


def matrix_bytes(weights: ModelWeights) -> int:
    """Bytes of the packed matrices and their scales; a tied head counts once."""
    outside = Outside(weights.embedding, None, weights.head).matrices()
    matrices = [*outside.values(), *(matrix for layer in weights.layers for matrix in layer.matrices.values())]
    return sum(map(_bytes, matrices))


def _bytes(matrix: Linear) -> int:
    return matrix.weight.nbytes + (0 if matrix.scales is None else matrix.scales.nbytes)


def _kind_of(matrix: Linear) -> str:
    """Type of a matrix, named as in `labkit.weights.precision`: "bfloat16", "int8", "int4-32"."""
    if matrix.scales is None:
        return matrix.weight_type
    group = "row" if matrix.group >= matrix.inputs else str(matrix.group)
    shown = f"int{matrix.bits}" + ("" if (matrix.bits, group) == (8, "row") else f"-{group}")
    usual = matrix.asymmetric == (matrix.bits == 4)
    return shown if usual else shown + ("-asymmetric" if matrix.asymmetric else "-symmetric")


def _kind(matrices: list[Linear]) -> str:
    """The type of most of the matrices' numbers."""
    numbers: Counter[str] = Counter()
    for matrix in matrices:
        numbers[_kind_of(matrix)] += matrix.outputs * matrix.inputs
    return numbers.most_common(1)[0][0]


def _bits(matrices: list[Linear]) -> float:
    """Average bits of a number with its share of the scales, without the padding of the layout."""
    stored = sum(matrix.outputs * _row_bits(matrix) for matrix in matrices)
    return stored / sum(matrix.outputs * matrix.inputs for matrix in matrices)


def _row_bits(matrix: Linear) -> int:
    if matrix.scales is None:
        return 8 * matrix.inputs * matrix.weight.itemsize
    _, groups, numbers, *_ = matrix.scales.shape  # of either layout
    return matrix.inputs * matrix.bits + 8 * matrix.scales.itemsize * groups * numbers
