"""The interface of everything that tensors come from."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from labkit.models.shards import Cut


class TensorSource(Protocol):
    """Where tensors come from, by their Hugging Face names: a model, a checkpoint, or a seeded generator."""

    def names(self) -> set[str]: ...

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor: ...
