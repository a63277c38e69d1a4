"""Canonical weights on their way into an engine. Each is loaded on demand, a large matrix in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.kernels.gemm import interleave_gate
from labkit.kernels.types import Linear
from labkit.system.rounding import BLOCK, ceil_div, round_up

MATRICES = frozenset({"qkv", "attn_out", "ff1", "ff2", "embed", "head", "project_in", "project_out"})


@dataclass(frozen=True)
class RowBlocks:
    """A matrix that is read some rows at a time: `rows(begin, end)`."""

    shape: tuple[int, int]
    rows: Callable[[int, int], Tensor]

    @classmethod
    def of(cls, matrix: Tensor | RowBlocks) -> RowBlocks:
        if isinstance(matrix, RowBlocks):
            return matrix
        return cls((matrix.shape[0], matrix.shape[1]), lambda begin, end: matrix[begin:end])

    def whole(self) -> Tensor:
        return self.rows(0, self.shape[0])


def interleaved(matrix: RowBlocks) -> RowBlocks:
    """A view of a matrix of gate rows, then up rows, in blocks that hold both."""
    inner = matrix.shape[0] // 2

    def rows(begin: int, end: int) -> Tensor:
        first, last = begin // 2, min(end // 2, inner)
        parts = (matrix.rows(first, last), matrix.rows(inner + first, inner + last))
        return interleave_gate(torch.cat(parts))

    return RowBlocks(matrix.shape, rows)


def interleaved_rows(outputs: int) -> int:
    """Rows of a matrix once gate and up rows are interleaved, each padded to half blocks."""
    return 2 * round_up(ceil_div(outputs, 2), BLOCK // 2)


Weight = Tensor | Linear | RowBlocks
Canonical = Mapping[str, Weight]  # by canonical name; a Linear is packed, or has codes and scales


class Loading(Mapping[str, Weight]):
    """Canonical weights of these names. `load` loads a weight each time it is looked up."""

    def __init__(self, names: Mapping[str, object], load: Callable[[str], Weight]) -> None:
        self._names, self._load = tuple(names), load

    def __getitem__(self, name: str) -> Weight:
        if name not in self._names:
            raise KeyError(name)
        return self._load(name)

    def __contains__(self, name: object) -> bool:  # Mapping's own would load it
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def is_matrix(name: str) -> bool:
    """Whether a canonical weight is a matrix that a kernel multiplies with; all other weights are float32 vectors."""
    role, kind = name.split(".")
    return kind == "weight" and role in MATRICES


def vectors_of(canonical: Canonical) -> dict[str, Tensor]:
    """All weights that are no matrices."""
    vectors = {name: canonical[name] for name in canonical if not is_matrix(name)}
    return {name: tensor for name, tensor in vectors.items() if isinstance(tensor, Tensor)}
