"""Reference: one expert after the other, each on the rows that chose it."""

import torch
from torch import Tensor

from ..mlp_gemm.reference import mlp
from .mlps import ExpertMlps


def experts(hidden: Tensor, chosen: Tensor, shares: Tensor, weights: ExpertMlps) -> Tensor:
    out = torch.zeros(len(hidden), weights.outs[0].outputs)
    for number, (region, down) in enumerate(zip(weights.regions, weights.outs, strict=True)):
        row, choice = (chosen == number).nonzero(as_tuple=True)
        if len(row):
            out.index_add_(0, row, shares[row, choice, None] * mlp(hidden[row], region, down))
    return out
