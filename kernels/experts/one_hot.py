"""Rows on their way to experts and back, in plain torch: by one-hot products, and by a table.

The first libraries for mixtures of experts multiplied a mask [N, E, C] with the rows, and again with the outputs. Most
of its numbers are zeros: the products take N * E * C * H multiplications, where a table moves N * K rows. C is the
number of rows of the busiest expert, so that nothing is dropped.

N rows, E experts, K experts of a row, H numbers of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot


def through_one_hot(hidden: Tensor, chosen: Tensor, shares: Tensor, experts: int) -> Tensor:
    """Rows [N, H] to their experts and back, with experts that change nothing: the sum of a row's shares times it.

    chosen int64 [N, K]. shares [N, K].
    """
    mask = one_hot(chosen, experts)  # [N, K, E]
    of_rows = mask.sum(1)  # [N, E]
    places = (of_rows.cumsum(0) - 1) * of_rows
    capacity = int(of_rows.sum(0).max())
    slots = one_hot(places, capacity) * of_rows[:, :, None]  # [N, E, C]
    dispatched = torch.einsum("nec,nh->ech", slots.to(hidden.dtype), hidden)
    weights = torch.einsum("nke,nk->ne", mask.to(hidden.dtype), shares)
    return torch.einsum("nec,ech->nh", slots.to(hidden.dtype) * weights[:, :, None], dispatched)


def through_table(hidden: Tensor, chosen: Tensor, shares: Tensor, experts: int) -> Tensor:
    """The same by a table: the choices in the order of the experts, and the row of each."""
    order = chosen.flatten().argsort(stable=True)
    rows = order // chosen.shape[1]
    dispatched = hidden[rows]
    return torch.zeros_like(hidden).index_add_(0, rows, dispatched * shares.flatten()[order, None])
