"""Which layers have an MLP instead of experts is read from the modules of the model itself."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from labkit.models.config import ModelConfig
from labkit.models.derived.head_linears import NotRecognised
from labkit.models.derived.recognise import recognise
from labkit.models.derived.row import DerivedRow
from labkit.models.derived.small_config import small_config
from labkit.models.derived.small_models import small_model, without_memory
from labkit.models.policies import model_config_of
from labkit.system.errors import UserError


@pytest.mark.parametrize(
    ("kind", "changes", "dense"),
    [
        ("glm4_moe", {"first_k_dense_replace": 3}, {0, 1, 2}),
        ("glm4_moe", {"first_k_dense_replace": 9}, set(range(9))),  # more than a small model has
        ("qwen3_moe", {"mlp_only_layers": [7, 20]}, {7, 20}),
        ("qwen2_moe", {"decoder_sparse_step": 3}, set(range(24)) - set(range(2, 24, 3))),
        ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}, {*range(0, 24, 2), 1}),
        ("ernie4_5_moe", {"moe_layer_start_index": 2, "moe_layer_end_index": 20}, {0, 1, *range(21, 28)}),
        ("exaone_moe", {}, {0}),
        ("hy_v3", {}, {0}),
        ("solar_open", {}, set()),
    ],
)
def test_the_layers_with_an_mlp_are_those_of_the_model(kind: str, changes: dict[str, Any], dense: set[int]) -> None:
    hf_config = CONFIG_MAPPING[kind](**changes)
    config = model_config_of(hf_config)
    assert {layer for layer in range(config.num_layers) if not config.has_experts(layer)} == dense
    assert config.dense_size == (hf_config.intermediate_size if dense else 0)
    assert config.weight_bytes(torch.int8) == sum(each.numel() for each in without_memory(hf_config).parameters()) + (
        biases_of_choice(config)
    )


def biases_of_choice(config: ModelConfig) -> int:
    """The numbers of these biases, which are buffers in some classes."""
    mixtures = sum(map(config.has_experts, range(config.num_layers)))
    experts = config.experts
    return mixtures * experts.count if experts and experts.choice_bias and config.architecture[:5] != "Ernie" else 0


def test_shares_that_are_no_numbers_are_left_out() -> None:
    """MiniMax-M2 divides 0 by 0 in rows for which the scores of all chosen experts vanish. Whether a run has such rows
    depends on its random weights.
    """
    config = small_config(CONFIG_MAPPING["minimax_m2"]())
    mixtures: list[Any] = [recognise(small_model(config, seed=seed)).layer.mlp for seed in range(6)]
    assert {(mixture.scores, mixture.renormalised, mixture.factor) for mixture in mixtures} == {("sigmoid", True, 1.0)}


def test_a_model_of_mlps_alone_has_no_experts() -> None:
    config = model_config_of(CONFIG_MAPPING["glm4_moe"](first_k_dense_replace=46))
    assert (config.experts, config.dense_layers, config.intermediate_size) == (None, (), 10944)


def test_a_kind_of_layer_that_the_small_model_did_not_show_is_refused() -> None:
    """It can have another activation, or another MLP."""
    whole, fewer = (CONFIG_MAPPING["qwen3_moe"](mlp_only_layers=layers) for layers in ([], [1]))
    roles = recognise(small_model(small_config(whole)))
    row = DerivedRow(whole, roles=roles)
    with pytest.raises(NotRecognised, match="layers without experts, of which the small model has none"):
        row.policy_for(without_memory(fewer))


@pytest.mark.parametrize("changes", [{"dense_size": 0}, {"experts": None}, {"biases": frozenset({"ff1"})}])
def test_dense_layers_that_no_kernel_has_are_refused(changes: dict[str, Any]) -> None:
    config = model_config_of(CONFIG_MAPPING["glm4_moe"]())
    with pytest.raises(UserError, match="dense_layers"):
        ModelConfig(**vars(config) | changes)


def test_some_of_the_layers_keep_their_kinds() -> None:
    config = model_config_of(CONFIG_MAPPING["glm4_moe"](first_k_dense_replace=3)).with_layers([4, 2, 0, 3])
    assert [config.has_experts(layer) for layer in range(4)] == [True, False, False, True]
    names = [set(config.layer_shapes(layer)) for layer in range(4)]
    assert "router.weight" in names[0] - names[1]
    assert "dense_ff1.weight" in names[1] - names[0]
    assert set(config.layer_shapes()) == names[0] | names[1]
