"""Tables with one entry per slot of each sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def counted(attention_mask: Tensor) -> Tensor:
    """Returns the position of each slot: the number of visible slots before it."""
    return attention_mask.ne(0).cumsum(1).sub_(1).clamp_(min=0)


def widened(table: Tensor, capacity: int, fill: int = 0) -> Tensor:
    """Returns a copy of `table` with `capacity` slots; new slots hold `fill`."""
    wide = torch.full((table.shape[0], capacity), fill, dtype=table.dtype, device=table.device)
    wide[:, : table.shape[1]] = table
    return wide


def count_on(positions: Tensor, length: int) -> Tensor:
    """Sets positions [B, C] from slot `length` on, and returns them: they count on from the slot before, or from 0, as
    in transformers' `generate`.
    """
    kind: dict[str, Any] = {"dtype": positions.dtype, "device": positions.device}
    last = positions[:, length - 1 : length] if length else torch.tensor([[-1]], **kind)
    positions[:, length:] = last + torch.arange(1, positions.shape[1] - length + 1, **kind)
    return positions
