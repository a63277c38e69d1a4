"""Weights whose routers prefer some experts: random routers choose almost evenly, and trained ones do not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.models.expert_names import ROUTER_IN_GGUF
from labkit.models.policies import POLICIES
from labkit.models.shards import Cut
from labkit.weights.protocol import TensorSource, identity_of

NAMES = {ROUTER_IN_GGUF} | {policy.router for policy in POLICIES.values() if policy.router}
ROUTERS = tuple(f".{name}.weight" for name in NAMES)


@dataclass(frozen=True)
class SkewedRouter:
    """The tensors of a source, with each router's rows multiplied by 1 + skew for the first expert, down in equal steps
    of a logarithm to 1 for the last. Rows of larger numbers have the largest logit more often.
    """

    source: TensorSource
    skew: float

    @property
    def identity(self) -> str:
        return f"{identity_of(self.source)}, routers skewed by {self.skew!r}"

    def names(self) -> set[str]:
        return self.source.names()

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor:
        tensor = self.source.get(name, dtype, cut)
        if not name.endswith(ROUTERS):
            return tensor
        scales = (1 + self.skew) ** torch.linspace(1, 0, len(tensor))[:, None]
        return (tensor.float() * scales).to(tensor.dtype)
