"""Norms, recognised by what they compute."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.models.observed.calls import ROUNDING, ObservedCall, distance

SMALL = 1e-3  # of inputs on which the epsilon shows
EPSILONS = ("variance_epsilon", "eps", "epsilon", "layer_norm_eps")  # attributes of norms
USUAL = (1e-5, 1e-6, 1e-12)  # epsilons of norms without such an attribute


@dataclass(frozen=True)
class NormKind:
    """What the norms of a model compute: (x / rms(x)) * (w + offset), or of x - mean(x), with a bias or without."""

    kind: str  # "rms" or "layer"
    eps: float
    offset: float
    bias: bool
    weights: bool = True  # False: w is 1, and there is no bias


def is_norm(module: nn.Module, call: ObservedCall) -> bool:
    """Whether a module may be a norm: it has a vector of weights, or no weights, and then the call shows one."""
    weight = getattr(module, "weight", None)
    if next(module.children(), None) is not None or not call.alone or call.x.shape != call.y.shape:
        return False
    if isinstance(weight, Tensor):
        return weight.dim() == 1
    return next(module.parameters(), None) is None and norm_kind(module, call.x.shape[-1]) is not None


def norm_kind(norm: nn.Module, size: int, *, gated: bool = False) -> NormKind | None:
    """The kind of a norm of rows of `size` numbers; None: it computes something else. gated: its forward takes as many
    numbers more, whose SiLU it multiplies by.
    """
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if isinstance(weight, Tensor) and weight.shape != (size,):
        return None
    known = [float(value) for name in EPSILONS if isinstance(value := getattr(norm, name, None), float)]
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    kinds = (("rms", 0.0), ("rms", 1.0), ("layer", 0.0), ("layer", 1.0))
    for eps, (kind, offset) in product(known[:1] or USUAL, kinds if weight is not None else kinds[::2]):
        found = NormKind(kind, eps, offset, isinstance(bias, Tensor), isinstance(weight, Tensor))
        if all(_same(norm, found, x * scale, gated) for scale in (1.0, SMALL)):
            return found
    return None


def _same(norm: nn.Module, kind: NormKind, x: Tensor, gated: bool) -> bool:
    stored: Any = norm
    weight, bias = stored.weight + kind.offset if kind.weights else None, stored.bias if kind.bias else None
    x = x.to(weight.dtype) if weight is not None else x
    if kind.kind == "layer":
        expected = functional.layer_norm(x, x.shape[-1:], weight, bias, kind.eps)
    elif bias is None:
        expected = functional.rms_norm(x, x.shape[-1:], weight, kind.eps)
    else:
        return False
    gates = [x.flip(-1)] if gated else []
    expected = expected * functional.silu(gates[0]) if gated else expected
    try:
        with torch.no_grad():
            y = norm(x, *gates)
    except (RuntimeError, TypeError, ValueError):  # a module that takes other arguments
        return False
    return isinstance(y, Tensor) and y.shape == expected.shape and distance(y, expected) <= ROUNDING[x.dtype]
