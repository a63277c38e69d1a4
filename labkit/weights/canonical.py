"""Canonical weights on their way into an engine. Each is loaded on demand, a large matrix in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from labkit.kernels.types import Linear
from labkit.models.shards import Shard
from labkit.system.rounding import BLOCK, ceil_div, round_up

MATRICES = frozenset({
    *("qkv", "attn_out", "ff1", "ff2", "embed", "head", "project_in", "project_out"),
    *("router", "shared_ff1", "shared_ff2", "shared_gate", "dense_ff1", "dense_ff2"),
})  # fmt: skip

OF_EXPERTS = frozenset({"ff1.weight", "ff2.weight"})  # with a mixture, each has the matrices of all experts


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

    @classmethod
    def joined(cls, pieces: Sequence[Tensor]) -> RowBlocks:
        """The rows of several matrices of one width, one matrix after the other."""
        first_rows = (0, *accumulate(map(len, pieces)))

        def rows(begin: int, end: int) -> Tensor:
            parts = [
                piece[max(begin - first, 0) : max(end - first, 0)]
                for piece, first in zip(pieces, first_rows, strict=False)
            ]
            parts = [part for part in parts if len(part)]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return cls((first_rows[-1], pieces[0].shape[1]), rows)

    def whole(self) -> Tensor:
        return self.rows(0, self.shape[0])

    def part(self, number: int, count: int) -> RowBlocks:
        """One of `count` equal parts of the rows."""
        size, inputs = self.shape[0] // count, self.shape[1]
        return RowBlocks((size, inputs), lambda begin, end: self.rows(number * size + begin, number * size + end))

    def halves(self) -> tuple[RowBlocks, RowBlocks]:
        """The upper and the lower half of the rows, such as gate rows and up rows."""
        return self.part(0, 2), self.part(1, 2)


def interleaved_rows(outputs: int) -> int:
    """Rows of a matrix once gate and up rows are interleaved, each padded to half blocks."""
    return 2 * round_up(ceil_div(outputs, 2), BLOCK // 2)


Weight = Tensor | Linear | RowBlocks
Canonical = Mapping[str, Weight]  # by canonical name; a Linear is packed, or has codes and scales
Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]  # returns memory for a matrix that its file holds packed


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


class CanonicalLayers:
    """A rank's canonical weights, as each subclass loads them. Weights that a file holds packed are read into memory
    from `empty`.
    """

    def __init__(self, part: Shard) -> None:
        self.part = part

    def top(self, empty: Empty) -> Canonical:
        """The weights outside the layers."""
        return Loading(self.part.top_shapes, lambda name: self.load(name, None, empty))

    def layer(self, index: int, empty: Empty) -> Canonical:
        return Loading(self.part.shapes_of(index), lambda name: self.load(name, index, empty))

    def load(self, name: str, index: int | None, empty: Empty) -> Weight:
        """One weight of layer `index`; None: outside the layers."""
        raise NotImplementedError


def is_matrix(name: str) -> bool:
    """Whether a canonical weight is a matrix that a kernel multiplies with; all other weights are float32 vectors."""
    role, kind = name.split(".")
    return kind == "weight" and role in MATRICES


def vectors_of(canonical: Canonical) -> dict[str, Tensor]:
    """All weights that are no matrices."""
    vectors = {name: canonical[name] for name in canonical if not is_matrix(name)}
    return {name: tensor for name, tensor in vectors.items() if isinstance(tensor, Tensor)}
