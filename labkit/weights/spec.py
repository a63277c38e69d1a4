"""The facts of a rank's weights, which planning, building, saving and streaming share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from labkit.kernels.types import float_dtype
from labkit.models.config import ModelConfig
from labkit.models.policies import policy_for
from labkit.models.policy import Policy
from labkit.models.shards import Shard, shard
from labkit.weights.quantise import Quantization, Scheme

UNCHANGED = Quantization()


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """Which weights a rank has, and how they are stored.

    policy: names and shapes of the model's tensors.
    part: layers, heads and rows of this rank.
    dtype: of the layers' matrices.
    impl: implementation that reads them.
    quant: how int8 matrices are quantised.
    """

    policy: Policy
    part: Shard
    dtype: torch.dtype
    impl: str = "cpp"
    quant: Quantization = UNCHANGED

    @classmethod
    def of(
        cls, hf_config: PretrainedConfig, dtype: torch.dtype, impl: str = "cpp", quant: Quantization = UNCHANGED
    ) -> WeightSpec:
        """Returns the spec of a whole decoder. Raises UserError as `policy_for` does, and for a wrong config."""
        policy = policy_for(hf_config)
        part = shard(policy.model_config(hf_config))
        return cls(policy=policy, part=part, dtype=dtype, impl=impl, quant=quant)

    @property
    def config(self) -> ModelConfig:
        """The config of the whole model; `part.local` is the config of this rank's part."""
        return self.part.config

    @property
    def layout(self) -> str:
        """The layout of the layers' matrices."""
        return {"cpp": "panels", "reference": "rows", "triton": "words" if self.quantised else "rows"}[self.impl]

    @property
    def quantised(self) -> bool:
        return self.dtype == torch.int8

    @property
    def stored_quant(self) -> Quantization | None:
        """How a checkpoint of these weights was quantised; None: it keeps the codes of a GGUF file."""
        return None if self.quant.as_stored else self.quant

    @property
    def unquantised(self) -> WeightSpec:
        """The same weights in floating point."""
        return replace(self, dtype=float_dtype(self.dtype))

    def scheme(self, name: str) -> Scheme | None:
        """How the canonical weight `name` is quantised; None: it is stored in floating point."""
        return self.quant.of(name) if self.quantised else None
