"""Norms, recognised by what they compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.models.observed.calls import ROUNDING, distance

SMALL = 1e-3  # of inputs on which the epsilon shows
EPSILONS = ("variance_epsilon", "eps", "epsilon", "layer_norm_eps")  # attributes of norms


@dataclass(frozen=True)
class NormKind:
    """What the norms of a model compute: (x / rms(x)) * (w + offset), or of x - mean(x), with a bias or without."""

    kind: str  # "rms" or "layer"
    eps: float
    offset: float
    bias: bool


def norm_kind(norm: nn.Module) -> NormKind | None:
    """The kind of a norm; None: it computes something else."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    eps = next((float(value) for name in EPSILONS if isinstance(value := getattr(norm, name, None), float)), None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None:
        return None
    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    for kind in ("rms", "layer"):
        for offset in (0.0, 1.0):
            found = NormKind(kind, eps, offset, isinstance(bias, Tensor))
            if all(_same(norm, found, x * scale) for scale in (1.0, SMALL)):
                return found
    return None


def _same(norm: nn.Module, kind: NormKind, x: Tensor) -> bool:
    stored: Any = norm
    weight, bias = stored.weight + kind.offset, stored.bias if kind.bias else None
    if kind.kind == "layer":
        expected = functional.layer_norm(x, x.shape[-1:], weight, bias, kind.eps)
    elif bias is None:
        expected = functional.rms_norm(x, x.shape[-1:], weight, kind.eps)
    else:
        return False
    with torch.no_grad():
        y = norm(x)
    return isinstance(y, Tensor) and y.shape == expected.shape and distance(y, expected) <= ROUNDING[x.dtype]
