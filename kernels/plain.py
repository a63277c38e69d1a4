"""Norms and matrix products as single torch ops, shared by the references. They compute in the type of their rows."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .types import Linear, Norm


def normalise(norm: Norm, x: Tensor) -> Tensor:
    """norm(x) over the last dimension."""
    if norm.kind == "layer":
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    if norm.kind == "rms":
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
    return x


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap)."""
    return torch.tanh(x / cap) * cap


def argmax_or_minus_one(logits: Tensor) -> Tensor:
    """argmax over the last dimension; -1 where all logits are NaN."""
    finite = logits.masked_fill(logits.isnan(), -float("inf"))
    best, index = finite.max(dim=-1)
    return index.masked_fill(best == -float("inf"), -1)


def linear(x: Tensor, weights: Linear) -> Tensor:
    """x W^T + b with the weight in layout "rows". For float32 rows any stored type, else the type of the rows."""
    weight = weights.floats() if x.dtype == torch.float32 else weights.weight
    return F.linear(x, weight, weights.bias)
