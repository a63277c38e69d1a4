"""Policies compared with vanilla models, through a plain-torch forward that reads only canonical names."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.models.plain_forward import Weights, forward
from helpers.models.small_models import SMALL_CONFIGS, VOCAB, WINDOW, small_config, small_model
from helpers.ranks.cut_models import ONE_OF_EACH_ROW
from torch import Tensor
from transformers import BertConfig, PreTrainedModel

from labkit.models.config import ModelConfig
from labkit.models.policies import POLICIES, model_config_of, policy_for
from labkit.models.policy import Policy
from labkit.models.shards import Cut, shard

TOKENS = 41


def whole(tensors: Weights) -> Callable[[str, Cut | None], Tensor]:
    return lambda name, cut: tensors[name]


def canonical(model: PreTrainedModel) -> tuple[Policy, ModelConfig, Weights, list[Weights]]:
    policy = policy_for(model.config)
    config = policy.model_config(model.config)
    tensors = model.state_dict()
    policy.check(config, tensors)
    layers = [policy.layer_tensors(shard(config), index, whole(tensors)) for index in range(config.num_layers)]
    return policy, config, policy.top_tensors(shard(config), whole(tensors)), layers


def text(length: int = TOKENS) -> Tensor:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(0))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / (expected.max() - expected.min())).item()


@pytest.mark.parametrize("name", SMALL_CONFIGS)
@torch.no_grad()
def test_forward_over_canonical_weights_equals_vanilla(name: str) -> None:
    model = small_model(name)
    _, config, top, layers = canonical(model)
    assert relative_error(forward(config, top, layers, text()), model(text()[None]).logits[0]) <= 1e-4


@pytest.mark.parametrize("name", SMALL_CONFIGS)
@torch.no_grad()
def test_every_canonical_weight_matters(name: str) -> None:
    """Otherwise the comparison with vanilla would not notice a weight read from the wrong place."""
    _, config, top, layers = canonical(small_model(name))
    logits = forward(config, top, layers, text())
    generator = torch.Generator().manual_seed(0)
    for weights in (top, layers[1]):
        for key, original in list(weights.items()):
            weights[key] = original * (1 + 0.1 * torch.rand(original.shape, generator=generator))
            change = relative_error(forward(config, top, layers, text()), logits)
            weights[key] = original
            assert change > 1e-4, key


@pytest.mark.parametrize("name", ["gpt-neo", "mistral", "qwen2-windowed", "qwen3-biased"])
@torch.no_grad()
def test_windows_are_shorter_than_the_text(name: str) -> None:
    _, config, top, layers = canonical(small_model(name))
    assert WINDOW in config.windows
    unlimited = replace(config, windows=(None,) * config.num_layers)
    assert relative_error(forward(unlimited, top, layers, text()), forward(config, top, layers, text())) > 1e-3


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_expected_tensors_are_the_models_own(name: str) -> None:
    model = small_model(name)
    policy, config, _, _ = canonical(model)
    assert policy.expected(config) == {path for path, _ in model.named_parameters()}
    assert config.weight_bytes(torch.bfloat16) == 2 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_annotated_modules_exist(name: str) -> None:
    model = small_model(name)
    policy, config, _, _ = canonical(model)
    absent: set[str | None] = {None} if config.final_norm else {None, policy.final_norm}
    if config.embedding_size == config.hidden_size:
        absent.add(policy.project_in)
    embed = (policy.tokens, policy.positions, policy.embed_norm, policy.project_in)
    for path in {*embed, policy.final_norm, policy.head} - absent:
        assert model.get_submodule(path)
    layer = model.get_submodule(f"{policy.layers}.{config.num_layers - 1}")
    for part in (policy.norm1, *policy.qkv, policy.attn_out, policy.norm2, *policy.ff1, policy.ff2):
        assert part is None or layer.get_submodule(part)


@pytest.mark.parametrize("name", SMALL_CONFIGS)
@torch.no_grad()
def test_the_row_says_which_positions_transformers_makes_up(name: str) -> None:
    """Two tokens are hidden on the left and two in the middle, so counting visible tokens and counting slots differ,
    even for a rotation, which only depends on distances.
    """
    model = small_model(name)
    ids, mask = text()[None], torch.ones(1, TOKENS, dtype=torch.int64)
    mask[:, [0, 1, 20, 21]] = 0
    visible = mask[0].bool()
    default_logits = model(ids, attention_mask=mask).logits[:, visible]
    from_mask = policy_for(model.config).positions_from_mask
    if name.startswith("bloom"):  # no position_ids; if positions come from the mask, hidden tokens have no effect
        assert from_mask == (relative_error(model(ids[:, visible]).logits, default_logits) < 1e-5)
        return
    positions = {True: (mask.cumsum(1) - 1).clamp(min=0), False: torch.arange(TOKENS)[None]}
    logits = {
        counts: model(ids, attention_mask=mask, position_ids=positions[counts]).logits[:, visible]
        for counts in positions
    }
    assert relative_error(logits[from_mask], default_logits) < 1e-5
    assert relative_error(logits[not from_mask], default_logits) > 1e-3
    assert model_config_of(model.config).positions_from_mask == from_mask


def test_every_row_has_a_small_model() -> None:
    assert {policy_for(small_config(name)).architecture for name in SMALL_CONFIGS} == set(POLICIES)


def test_a_model_of_every_row_is_cut_among_ranks() -> None:
    cut = {policy_for(small_config(name)).architecture for name in ONE_OF_EACH_ROW}
    assert cut == POLICIES.keys() - {"OlmoeForCausalLM"}  # its norms are over all heads


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt-post-norm"])
def test_missing_and_extra_tensors_are_named(name: str) -> None:
    policy, config, _, _ = canonical(small_model(name))
    names = policy.expected(config)
    missing = f"{policy.layers}.2.{policy.ff2}.weight"
    with pytest.raises(ValueError, match=f"1 missing: {missing}.*1 extra: {policy.layers}.7.surprise"):
        policy.check(config, names - {missing} | {f"{policy.layers}.7.surprise"})


def test_known_buffers_and_a_tied_head_may_be_present() -> None:
    policy, config, _, _ = canonical(small_model("gpt2"))
    buffers = {"transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias", "lm_head.weight"}
    policy.check(config, policy.expected(config) | buffers)


def test_names_of_older_checkpoints_become_current_and_current_ones_stay() -> None:
    assert POLICIES["GPT2LMHeadModel"].current_name("h.0.ln_1.bias") == "transformer.h.0.ln_1.bias"
    assert POLICIES["GPTNeoXForCausalLM"].current_name("embed_out.weight") == "lm_head.weight"
    assert POLICIES["OPTForCausalLM"].current_name("decoder.embed_tokens.weight") == "model.decoder.embed_tokens.weight"
    for name in SMALL_CONFIGS:
        policy = policy_for(small_config(name))
        names = policy.expected(policy.model_config(small_config(name)))
        assert {policy.current_name(stored) for stored in names} == names


def test_a_tensor_of_the_wrong_shape_is_named() -> None:
    model = small_model("gpt-neox-parallel")
    policy, config, _, _ = canonical(model)
    tensors = model.state_dict() | {"gpt_neox.layers.1.attention.query_key_value.weight": torch.zeros(177, 60)}
    with pytest.raises(
        ValueError, match=r"layers.1.attention.query_key_value.weight .*\[177, 60\], expected \[180, 60\]"
    ):
        policy.layer_tensors(shard(config), 1, whole(tensors))


def test_an_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'bert'.*GPT2LMHeadModel, GPTJForCausalLM"):
        policy_for(BertConfig())
    with pytest.raises(ValueError, match=r"BertLMHeadModel of model type 'bert', from whose class .*; expected one of"):
        policy_for(BertConfig(architectures=["BertLMHeadModel"]))


@pytest.mark.parametrize(
    ("name", "architecture"), [("llama", "LLaMAForCausalLM"), ("llama", "LlamaModel"), ("bloom", "BloomModel")]
)
def test_an_architecture_is_found_by_its_model_type_whatever_its_name(name: str, architecture: str) -> None:
    assert policy_for(small_config(name, architectures=[architecture])) is policy_for(small_config(name))


def test_the_model_type_decides_as_in_transformers() -> None:
    assert policy_for(small_config("llama", architectures=["MistralForCausalLM"])).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("name", "switch", "overrides"),
    [
        ("gpt2", "add_cross_attention = true", {"add_cross_attention": True}),
        ("gpt2", 'activation "tanh"', {"activation_function": "tanh"}),
        ("gpt2", "quantization_config", {"quantization_config": {"quant_method": "gptq"}}),
        ("gpt2", "hidden size 61 cannot be split over 3 heads", {"n_embd": 61}),
        ("gptj", "rotary_dim = 24", {"rotary_dim": 24}),
        ("opt", "layer_norm_elementwise_affine = false", {"layer_norm_elementwise_affine": False}),
        ("llama", "6 query heads cannot share 4", {"num_key_value_heads": 4}),
        ("llama", 'rope_type = "dynamic"', {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
        (
            "llama",
            "partial_rotary_factor = 0.5",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        ),
        ("qwen3", 'layer_types names ."chunked_attention"', {"layer_types": ["chunked_attention"] * 3}),
        ("gemma2", "layer_types names sliding_attention and sliding_window is null", {"sliding_window": None}),
    ],
)
def test_a_switch_that_is_not_computed_is_refused_by_name(name: str, switch: str, overrides: dict[str, object]) -> None:
    config = small_config(name, **overrides)
    with pytest.raises(ValueError, match=switch):
        model_config_of(config)
