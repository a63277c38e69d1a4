"""Tables with an entry for each slot of each sequence."""

from __future__ import annotations

import torch
from torch import Tensor


def counted(attention_mask: Tensor) -> Tensor:
    """The position of each slot: how many visible ones come before it."""
    return attention_mask.ne(0).cumsum(1).sub_(1).clamp_(min=0)


def widened(table: Tensor | None, capacity: int, fill: int = 0) -> Tensor:
    """The same with room for more slots, each with `fill` in it."""
    assert table is not None
    wide = torch.full((table.shape[0], capacity), fill, dtype=table.dtype, device=table.device)
    wide[:, : table.shape[1]] = table
    return wide
