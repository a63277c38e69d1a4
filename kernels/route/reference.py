"""Reference: the unfused sequence (bias, residual, norm, product, softmax, top-k)."""

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
    shares, chosen = linear(normed, router.matrix).float().softmax(dim=-1).topk(router.chosen, dim=-1)
    if router.renormalised:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return normed, hidden, chosen, shares
