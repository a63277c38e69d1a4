"""Tensors that are divided among files as DeepSpeed describes them, by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from labkit.models.shards import Cut
from labkit.system.errors import UserError
from labkit.weights.checkpoint.files import TensorFile
from labkit.weights.checkpoint.pieces import Divided, FilePart


class DividedWeights:
    """Tensors that are assembled from their files, or cut, on demand. None is kept."""

    def __init__(self, tensors: Mapping[str, Divided]) -> None:
        self._tensors = tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor:
        if name not in self._tensors:
            raise KeyError(f"no tensor {name!r} in this checkpoint; names() lists them")
        try:
            tensor = self._tensors[name].get(cut)
        except ValueError as error:
            raise UserError(f"{name} {error}; check that the checkpoint and the model belong together") from None
        return tensor if dtype is None else tensor.to(dtype, copy=True)


def same_names(files: Sequence[TensorFile], prefix: str = "") -> list[str]:
    """The names with this prefix of the tensors in the files. Every file must hold a part of every tensor.

    Raises UserError if a file holds other tensors than the first file.
    """
    first, *others = [{name for name in file.names() if name.startswith(prefix)} for file in files]
    for file, names in zip(files[1:], others, strict=True):
        if different := first ^ names:
            raise UserError(
                f"{files[0].path} and {file.path} hold different tensors, {min(different)} for one; "
                "all shards must come from one save of one model"
            )
    return sorted(first)


def replicated(name: str, files: Sequence[TensorFile], tensors: Sequence[Tensor]) -> Divided:
    """A tensor that every file holds whole. Raises UserError if the files differ."""
    for file, tensor in zip(files, tensors, strict=True):
        if tensor.shape != tensors[0].shape or not torch.equal(tensor, tensors[0]):
            raise UserError(
                f"{name} is not the same in {files[0].path} and {file.path}; "
                "all shards must come from one save of one model"
            )
    only = tensors[0]
    return Divided(tuple(only.shape), 0, (FilePart(lambda: only, ((0, len(only)),)),))


def side_by_side(lengths: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """The ranges of consecutive parts of these lengths."""
    ends = [sum(lengths[: count + 1]) for count in range(len(lengths))]
    return [((end - length, end),) for length, end in zip(lengths, ends, strict=True)]


def by_thirds(lengths: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """The ranges of parts of these lengths that each hold query, key and value rows of their own heads."""
    thirds = side_by_side([length // 3 for length in lengths])
    whole = thirds[-1][0][1]
    return [tuple((third * whole + begin, third * whole + end) for third in range(3)) for ((begin, end),) in thirds]
