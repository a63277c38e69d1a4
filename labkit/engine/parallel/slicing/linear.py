"""Linear layers that are divided among ranks.

A column-parallel layer computes some output features from the whole input. A row-parallel layer computes partial sums
from some input features, and adds them up over the ranks.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from labkit.engine.parallel.slicing.shares import Share, take
from labkit.models.observed.calls import matrix

Reduce = Callable[[Tensor], Tensor]  # a rank's partial sum -> the sum over the ranks, the same on each


class GroupSum:
    """Sum over the ranks of a torch.distributed group (None: all processes)."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __call__(self, partial: Tensor) -> Tensor:
        partial = partial.contiguous()
        dist.all_reduce(partial, group=self.group)
        return partial

    def __deepcopy__(self, memo: dict[int, object]) -> "GroupSum":
        return self  # process groups can't be copied


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def _bias(linear: nn.Module) -> Tensor | None:
    bias: Tensor | None = linear.bias  # type: ignore[assignment]
    return None if bias is None else bias.detach()


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.contiguous(), requires_grad=False)


class ParallelLinear(nn.Module):
    """A rank's part of a linear. bias: None: the linear has none."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = _parameter(weight)
        self.bias = None if bias is None else _parameter(bias)
        self.out_features, self.in_features = weight.shape


class ColumnParallelLinear(ParallelLinear):
    """x [..., in] -> this rank's features [..., kept out]."""

    @classmethod
    def of(cls, linear: nn.Module, share: Share) -> "ColumnParallelLinear":
        bias = _bias(linear)
        return cls(take(matrix(linear), 0, share), None if bias is None else take(bias, 0, share))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, kept out_features={self.out_features}"


class RowParallelLinear(ParallelLinear):
    """x [..., kept in] -> the whole [..., out], summed over the ranks by `reduce`. The bias is added once."""

    def __init__(self, weight: Tensor, bias: Tensor | None, reduce: Reduce) -> None:
        super().__init__(weight, bias)
        self.reduce = reduce

    @classmethod
    def of(cls, linear: nn.Module, share: Share, reduce: Reduce) -> "RowParallelLinear":
        bias = _bias(linear)
        return cls(take(matrix(linear), 1, share), None if bias is None else bias.clone(), reduce)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:  # the error of a plain matmul is less helpful
            raise RuntimeError(f"got {x.shape[-1]} features, expected this rank's {self.in_features}")
        y = self.reduce(functional.linear(x, self.weight))
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"kept in_features={self.in_features}, out_features={self.out_features}"


def emptied(linear: nn.Module) -> None:
    """Frees the parameters of a linear whose shares were taken."""
    for parameter in linear.parameters(recurse=False):
        parameter.data = torch.empty(0, dtype=parameter.dtype)
