"""The row derived from a class that has one of its own describes the same engine, so it has the same speed."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.models.small_models import small_model
from helpers.sweeps import swept
from safetensors.torch import load_file

from labkit.models.config import ModelConfig
from labkit.models.derived.row import DerivedRow
from labkit.models.policies import model_config_of, policy_for

DENSE = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2"]
MIXTURES = ["mixtral", "qwen3-moe", "qwen2-moe", "olmoe", "granite-moe"]
OF_MIXTURE = ("router", "experts", "shared_ff1", "shared_ff2", "shared_gate")
ROLES = ("layers", "norm1", "qkv", "attn_out", "norm2", "ff1", "ff2", "tokens", "final_norm", "transposed")


@pytest.mark.parametrize("name", swept(DENSE + MIXTURES, ["llama", "gemma2", "mixtral", "qwen2-moe"]))
def test_a_derived_row_is_the_row(name: str) -> None:
    model = small_model(name)
    row, derived = policy_for(model.config), DerivedRow(model.config).policy_for(model)
    assert without_unused(derived.model_config(model.config)) == without_unused(row.model_config(model.config))
    roles = ROLES + OF_MIXTURE
    assert [getattr(derived, role) for role in roles] == [getattr(row, role) for role in roles]


@pytest.mark.parametrize("name", ["mixtral", "granite-moe"])
def test_a_derived_row_knows_the_names_in_checkpoints(name: str, tmp_path: Path) -> None:
    """transformers saves other names than its class has."""
    model = small_model(name)
    derived, config = DerivedRow(model.config).policy_for(model), model_config_of(model.config)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) - set(model.state_dict())
    derived.check(config, derived.current_names(config, stored).values())


def without_unused(config: ModelConfig) -> ModelConfig:
    """The config without `norm_bias` for RMS norms, which have no bias."""
    return replace(config, norm_bias=False) if config.norm == "rms" else config
