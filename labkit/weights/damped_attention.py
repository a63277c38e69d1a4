"""Weights whose attention adds little to a row, so that each token chooses its experts by itself.

In a model with random weights the context outweighs the token, and the tokens of a text choose alike. Trained models
are between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from labkit.models.policies import policy_for
from labkit.models.shards import Cut
from labkit.weights.protocol import identity_of
from labkit.weights.source import ModelSource


@dataclass(frozen=True)
class DampedAttention:
    """The tensors of a source, with the matrices of attention's output multiplied by `factor`."""

    source: ModelSource
    factor: float

    @property
    def identity(self) -> str:
        return f"{identity_of(self.source)}, attention times {self.factor!r}"

    @cached_property
    def _outputs(self) -> set[str]:
        policy = policy_for(self.source.hf_config)
        layers = range(policy.model_config(self.source.hf_config).num_layers)
        return {name for layer in layers for name in policy.stored_names("attn_out.weight", layer)}

    def names(self) -> set[str]:
        return self.source.names()

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor:
        tensor = self.source.get(name, dtype, cut)
        return (tensor.float() * self.factor).to(tensor.dtype) if name in self._outputs else tensor
