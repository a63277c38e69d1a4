"""Modules that take the places of a transformers model's own: linears, MLPs and embeddings on packed matrices.

They take and return tensors as the originals do, in any type; sums are in float32. Not for training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from labkit.engine.hf.packed import PackedModule
from labkit.engine.team_size import team_size
from labkit.kernels.checks import unchecked
from labkit.kernels.gemm import gemm as checked_gemm
from labkit.kernels.gemm import unpack_rows as checked_unpack_rows
from labkit.kernels.gpu import CPU
from labkit.kernels.mlp_gemm import mlp as checked_mlp
from labkit.kernels.types import Linear, MlpWeights
from labkit.models.observed.calls import version_of
from labkit.system.errors import UnsupportedError

# Largest distance of the outputs of a part on the kernels to the original's.
FAR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
gemm, mlp, unpack_rows = unchecked(checked_gemm), unchecked(checked_mlp), unchecked(checked_unpack_rows)


def multiplied(x: Tensor, matrix: Linear) -> Tensor:
    """x [..., inputs] -> x W^T + b [..., outputs], in the type of x."""
    return _by_rows(x, matrix.outputs, lambda rows: gemm(rows, matrix, threads=team_size(), impl="cpp"))


def _by_rows(x: Tensor, outputs: int, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """x [..., inputs] -> [..., outputs], in the type of x. compute: float32 [rows, inputs] -> [rows, outputs]."""
    shape = (*x.shape[:-1], outputs)
    if not x.numel():  # an expert that no token has chosen
        return x.new_empty(shape)
    return compute(float_rows(x)).to(x.dtype).view(shape)


def float_rows(x: Tensor) -> Tensor:
    """x [..., n] as contiguous float32 [rows, n]."""
    return x.reshape(-1, x.shape[-1]).float().contiguous()


class PackedWeight(Tensor):
    """The shape and type of a weight that is packed, for code that looks at them. To compute with it raises ValueError.

    (A tensor on the meta device would not do: torch multiplies tensors on the CPU by it, and returns random numbers.)
    """

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise UnsupportedError(
            f"the weight is packed for the kernels, and {function} would need its numbers; use the original model's"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedWeight({list(self.shape)}, {self.dtype})"


class InjectedModule(PackedModule, nn.Module):
    """A module whose weights are packed.

    dtype: of the activations around it. weight, bias: the originals' shapes and types.
    matrices: that its forward multiplies by.
    """

    device = CPU
    matrices: tuple[Linear, ...]

    def __init__(self, dtype: torch.dtype, outputs: int, inputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = PackedWeight((outputs, inputs), dtype)
        self.bias = PackedWeight((outputs,), dtype) if bias else None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]


class InjectedLinear(InjectedModule):
    """x [..., inputs] -> [..., outputs]."""

    def __init__(self, matrix: Linear, dtype: torch.dtype) -> None:
        super().__init__(dtype, matrix.outputs, matrix.inputs, bias=matrix.bias is not None)
        self.matrix, self.matrices = matrix, (matrix,)

    def forward(self, x: Tensor) -> Tensor:
        return multiplied(x, self.matrix)


@dataclass
class Product:
    """The outputs of joined linears for a tensor. parts: the outputs that no linear has taken yet, by its number."""

    x: Tensor
    version: int
    parts: dict[int, Tensor]


class JoinedLinears:
    """Linears that read the same tensor, as one matrix: the first call multiplies, and the others take their parts."""

    def __init__(self, matrix: Linear, outputs: Sequence[int]) -> None:
        """outputs: of each linear."""
        self.matrix, self._outputs = matrix, list(outputs)
        self._latest: Product | None = None

    def part(self, number: int, x: Tensor) -> Tensor:
        """The outputs of one of the linears for x."""
        latest = self._latest  # of this thread or another one
        part = None
        if latest is not None and latest.x is x and latest.version == version_of(x):
            part = latest.parts.pop(number, None)
        if latest is None or part is None:
            parts = dict(enumerate(multiplied(x, self.matrix).split(self._outputs, dim=-1)))
            part = parts.pop(number)
            self._latest = latest = Product(x, version_of(x), parts)
        if not latest.parts:
            self._latest = None
        return part.contiguous()


class JoinedLinear(InjectedModule):
    """One of several linears that read the same tensor."""

    def __init__(self, joined: JoinedLinears, number: int, outputs: int, dtype: torch.dtype, *, bias: bool) -> None:
        super().__init__(dtype, outputs, joined.matrix.inputs, bias=bias)
        self.joined, self._number = joined, number
        self.matrices = (joined.matrix,)

    def forward(self, x: Tensor) -> Tensor:
        return self.joined.part(self._number, x)


class InjectedMlp(InjectedModule):
    """A whole MLP in one call."""

    def __init__(self, region: MlpWeights, down: Linear, dtype: torch.dtype) -> None:
        super().__init__(dtype, down.outputs, region.up.inputs)
        self.region, self.down = region, down
        self.matrices = (region.up, down)

    def forward(self, x: Tensor) -> Tensor:
        region, down = self.region, self.down
        return _by_rows(x, down.outputs, lambda rows: mlp(rows, region, down, threads=team_size(), impl="cpp"))


class InjectedEmbedding(InjectedModule):
    """The rows of the head's packed matrix for tokens, times a scale."""

    def __init__(self, matrix: Linear, scale: float, dtype: torch.dtype) -> None:
        super().__init__(dtype, matrix.outputs, matrix.inputs)
        self.matrix, self.scale = matrix, scale
        self.matrices = (matrix,)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = unpack_rows(self.matrix, tokens.flatten()).to(self.dtype)
        return (rows * self.scale if self.scale != 1.0 else rows).view(*tokens.shape, self.matrix.inputs)


def packed_matrices(model: nn.Module) -> tuple[list[Linear], list[Linear]]:
    """The matrices of a model's replaced modules, each once: the layers' and embeddings', and the head's."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    heads = list(head.matrices) if isinstance(head, InjectedModule) else []
    replaced = (module for module in model.modules() if isinstance(module, InjectedModule))
    every = {id(matrix): matrix for module in replaced for matrix in module.matrices}
    others = [matrix for key, matrix in every.items() if key not in set(map(id, heads))]
    return others or heads, heads or others
