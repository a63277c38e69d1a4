"""The interface of everything that tensors come from."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from labkit.models.shards import Cut
from labkit.system.errors import UserError


class TensorSource(Protocol):
    """Where tensors come from, by their Hugging Face names: a model, a checkpoint, or a seeded generator."""

    def names(self) -> set[str]: ...

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor: ...


def finite(tensor: Tensor, name: str) -> Tensor:
    """The tensor. Raises UserError if it holds a NaN or an infinity."""
    if not is_finite(tensor):
        raise UserError(f"{name} holds values that are not finite (NaN or infinity); the checkpoint is damaged")
    return tensor


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite; an empty tensor's are."""
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))
