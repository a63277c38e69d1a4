"""Norms that transformers writes out in Python, by one call of a kernel. torch's own norms are one call already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from labkit.engine.alterations import changed_code
from labkit.engine.injected.modules import float_rows
from labkit.engine.team_size import team_size
from labkit.kernels.checks import FLOATS, unchecked
from labkit.kernels.norm_rows import norm_rows as checked_norm_rows
from labkit.kernels.types import Norm
from labkit.models.derived.norms import NormKind, norm_kind

norm_rows = unchecked(checked_norm_rows)
TORCH_NORMS = (nn.LayerNorm, nn.RMSNorm)


def written_norms(model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model that may be norms, by path. dtype: that their weights must have; None: any."""
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if (
            isinstance(weight, Tensor)
            and weight.dim() == 1
            and weight.dtype in FLOATS
            and dtype in (None, weight.dtype)
            and set(dict(module.named_parameters())) <= {"weight", "bias"}
            and type(module) not in TORCH_NORMS
            and not changed_code(module)
        ):
            yield path, module


def norm_instead(module: nn.Module, *, gated: bool) -> InjectedNorm | None:
    """A module that computes the same norm; None: it computes something else. gated: it takes a gate, too."""
    stored: Any = module
    kind = norm_kind(module, len(stored.weight), gated=gated)
    return None if kind is None else InjectedNorm(module, kind)


class InjectedNorm(nn.Module):
    """LayerNorm or RMSNorm of rows, times the SiLU of a gate if there is one. weight, bias: the original's."""

    def __init__(self, original: nn.Module, kind: NormKind) -> None:
        super().__init__()
        stored: Any = original
        self.weight = nn.Parameter(stored.weight.detach(), requires_grad=False)
        self.bias = nn.Parameter(stored.bias.detach(), requires_grad=False) if kind.bias else None
        bias = stored.bias.detach().float().clone() if kind.bias else None
        self.norm = Norm(kind.kind, stored.weight.detach().float() + kind.offset, bias, kind.eps)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        if not x.numel():
            return torch.empty_like(x)
        rows, open_rows = float_rows(x), None if gate is None else float_rows(gate)
        return norm_rows(rows, self.norm, open_rows, threads=team_size(), impl="cpp").to(x.dtype).view(x.shape)
