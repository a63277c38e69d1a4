"""Linear layers that are divided among ranks.

A column-parallel layer computes some output features from the whole input. A row-parallel layer computes partial sums
from some input features, and adds them up over the ranks.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from labkit.engine.parallel.slicing.shares import Share, take
from labkit.models.observed.calls import bias_of, matrix

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


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """x [..., in] -> x weight^T + bias [..., out]."""
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.contiguous(), requires_grad=False)
    return linear


def column_parallel(linear: nn.Module, share: Share) -> nn.Linear:
    """A rank's part of a linear: x [..., in] -> the share's features [..., kept out]."""
    bias = bias_of(linear)
    return linear_of(take(matrix(linear), 0, share), None if bias is None else take(bias, 0, share))


class RowParallelLinear(nn.Module):
    """x [..., kept in] -> the whole [..., out]: a rank's partial sum, summed over the ranks by `reduce`. The bias is
    added once.
    """

    def __init__(self, partial: nn.Linear, bias: Tensor | None, reduce: Reduce) -> None:
        super().__init__()
        self.partial, self.reduce = partial, reduce
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """This rank's part of the weight; the forward of some models reads its type."""
        return self.partial.weight

    @classmethod
    def of(cls, linear: nn.Module, share: Share, reduce: Reduce) -> "RowParallelLinear":
        bias = bias_of(linear)
        return cls(linear_of(take(matrix(linear), 1, share), None), None if bias is None else bias.clone(), reduce)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.partial.in_features:  # the error of a plain matmul is less helpful
            raise RuntimeError(f"got {x.shape[-1]} features, expected this rank's {self.partial.in_features}")
        y = self.reduce(self.partial(x))
        return y if self.bias is None else y + self.bias


def emptied(linear: nn.Module) -> None:
    """Frees the parameters of a linear whose shares were taken."""
    for parameter in linear.parameters(recurse=False):
        parameter.data = torch.empty(0, dtype=parameter.dtype)
