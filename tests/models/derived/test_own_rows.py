"""The row derived from a class that has one of its own describes the same engine, so it has the same speed."""

from dataclasses import replace

import pytest
from helpers.models.small_models import small_model
from helpers.sweeps import swept

from labkit.models.config import ModelConfig
from labkit.models.derived.row import DerivedRow
from labkit.models.policies import policy_for

ROLES = ("layers", "norm1", "qkv", "attn_out", "norm2", "ff1", "ff2", "tokens", "final_norm", "transposed")


@pytest.mark.parametrize("name", swept(["llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2"], ["llama", "gemma2"]))
def test_a_derived_row_is_the_row(name: str) -> None:
    model = small_model(name)
    row, derived = policy_for(model.config), DerivedRow(model.config).policy_for(model)
    assert without_unused(derived.model_config(model.config)) == without_unused(row.model_config(model.config))
    assert [getattr(derived, role) for role in ROLES] == [getattr(row, role) for role in ROLES]


def without_unused(config: ModelConfig) -> ModelConfig:
    """The config without `norm_bias` for RMS norms, which have no bias."""
    return replace(config, norm_bias=False) if config.norm == "rms" else config
