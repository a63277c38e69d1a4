"""Reference: the unfused sequence (bias, residual, norm, product, scores, top-k)."""

import torch
from torch import Tensor

from ..plain import linear, normalise
from .router import Router


def route(
    hidden: Tensor, addend: Tensor | None, addend_bias: Tensor | None, router: Router
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if addend is not None:
        addend = addend if addend_bias is None else addend + addend_bias
        hidden = hidden + normalise(router.addend_norm, addend)
    normed = normalise(router.norm, hidden)
    logits = linear(normed, router.matrix).float()
    scores = logits.sigmoid() if router.scores == "sigmoid" else logits.softmax(dim=-1)
    compared = logits if router.choice_bias is None else scores + router.choice_bias
    chosen = compared.topk(router.chosen, dim=-1).indices
    shares = scores.gather(-1, chosen)
    if router.renormalised:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    shares = shares.masked_fill(compared.isnan().any(dim=-1, keepdim=True), torch.nan)
    return normed, hidden, chosen, router.factor * shares
