"""A model whose tables or attributes differ from its config's is refused by name; an unchanged one never is."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import encoders
from helpers.models.engines import few_models, prompt
from helpers.models.small_models import LLAMA3_ROPE, SMALL_CONFIGS, small_config, small_model
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import labkit
from labkit.engine.alterations import refuse_alterations
from labkit.models.encoder_policies import encoder_policy_for
from labkit.models.policies import policy_for
from labkit.system.errors import UserError

HALVES = (torch.bfloat16, torch.float16)


def refuse_what_differs(model: PreTrainedModel) -> None:
    policy = encoder_policy_for(model) or policy_for(model.config)
    refuse_alterations(model, policy, policy.model_config(model.config))


def unchanged(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model in every state that leaves its computation as the config says, apart from rounding."""
    yield model
    yield model.train()
    model.gradient_checkpointing_enable()
    yield model
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.float32):
        yield model.to(dtype)
    yield copy.deepcopy(model).eval()


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_an_unchanged_model_is_never_refused(name: str) -> None:
    for model in unchanged(small_model(name)):
        refuse_what_differs(model)


@pytest.mark.parametrize("task", encoders.TASKS)
@pytest.mark.parametrize("name", encoders.CONFIGS)
def test_an_unchanged_encoder_is_never_refused(name: str, task: str) -> None:
    for model in unchanged(copy.deepcopy(encoders.vanilla(name, task))):
        refuse_what_differs(model)


@few_models
@torch.no_grad()
def test_a_loaded_model_is_not_refused_before_or_after_it_has_computed(name: str, tmp_path: Path) -> None:
    small_model(name, dtype=torch.bfloat16).save_pretrained(tmp_path)
    for dtype in (torch.float32, *HALVES):
        model = type(small_model(name)).from_pretrained(tmp_path, dtype=dtype)
        refuse_what_differs(model)
        model(prompt(1, 5))
        refuse_what_differs(model)


def test_dropout_and_notes_of_a_config_decide_nothing() -> None:
    model = small_model("gpt2")
    model.config.pad_token_id = model.config.eos_token_id = 50256  # beyond the vocabulary
    model.config.attn_pdrop = model.config.resid_pdrop = 0.0
    model.transformer.drop = nn.Identity()
    model.transformer.h[1].attn.layer_idx = 0
    refuse_what_differs(model)


def scaled(table: str, factor: float) -> Callable[[PreTrainedModel], None]:
    def change(model: PreTrainedModel) -> None:
        model.get_buffer(table).mul_(factor)

    return change


def registered(model: PreTrainedModel) -> None:
    rotary = model.model.rotary_emb
    rotary.register_buffer("inv_freq", rotary.inv_freq / 4, persistent=False)


def as_a_parameter(model: PreTrainedModel) -> None:
    rotary = model.model.rotary_emb
    frequencies = rotary.inv_freq / 4
    del rotary.inv_freq
    rotary.inv_freq = nn.Parameter(frequencies)


def of_another_config(model: PreTrainedModel) -> None:
    model.model.rotary_emb = LlamaRotaryEmbedding(small_config("llama", rope_parameters=LLAMA3_ROPE))


def of_other_width(model: PreTrainedModel) -> None:
    model.model.rotary_emb = LlamaRotaryEmbedding(small_config("llama", head_dim=12))


def rescaled_in_bfloat16(model: PreTrainedModel) -> None:
    model.to(torch.bfloat16)
    model.model.rotary_emb.inv_freq.mul_(1.02)


def config_later(model: PreTrainedModel) -> None:
    model.config.rope_parameters = LLAMA3_ROPE


def sets(attribute: str, value: Any) -> Callable[[PreTrainedModel], None]:
    def change(model: PreTrainedModel) -> None:
        path, _, name = attribute.rpartition(".")
        setattr(model.get_submodule(path), name, value)

    return change


def wider_window(model: PreTrainedModel) -> None:
    model.transformer.h[1].attn.attention.bias.copy_(model.transformer.h[0].attn.attention.bias)


def other_norm(model: PreTrainedModel) -> None:
    weight = model.model.norm.weight
    model.model.norm = nn.LayerNorm(len(weight), bias=False)
    model.model.norm.weight = weight


def longer_window(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.sliding_window += 5


CHANGES: list[tuple[str, str, Callable[[PreTrainedModel], None], str]] = [
    (
        "inv_freq",
        "llama",
        scaled("model.rotary_emb.inv_freq", 0.25),
        r"model\.rotary_emb\.inv_freq is 0\.25 at \[0\] \(the config's: 1\), which the kernels would leave out; .*: "
        "undo the change, or change the config and load the model anew, or run the model as it is",
    ),
    ("inv_freq slightly", "llama", scaled("model.rotary_emb.inv_freq", 1.001), r"rotary_emb\.inv_freq is 1\.001 at"),
    ("inv_freq in bfloat16", "llama", rescaled_in_bfloat16, r"model\.rotary_emb\.inv_freq is 1\.02"),
    ("inv_freq of NeoX", "gpt-neox-parallel", scaled("gpt_neox.rotary_emb.inv_freq", 0.5), r"inv_freq is 0\.5 at"),
    ("inv_freq not a number", "qwen3", scaled("model.rotary_emb.inv_freq", torch.nan), r"inv_freq is nan at \[0\]"),
    ("registered buffer", "llama", registered, r"model\.rotary_emb\.inv_freq is 0\.25 at \[0\]"),
    ("parameter", "llama", as_a_parameter, r"model\.rotary_emb\.inv_freq is 0\.25 at \[0\]"),
    ("rotary_emb of another config", "llama", of_another_config, r"model\.rotary_emb\.(inv_freq|rope_type) is"),
    (
        "rotary_emb of other heads",
        "llama",
        of_other_width,
        r"inv_freq is of shape \[6\] \(the config's: of shape \[10\]",
    ),
    ("rope_parameters", "llama", config_later, r"model\.rotary_emb\.(inv_freq|rope_type) is"),
    (
        "attention_scaling",
        "llama-yarn",
        sets("model.rotary_emb.attention_scaling", 1.5),
        r"attention_scaling is 1\.5 \(the config's: 1\.1386",
    ),
    (
        "embed_positions",
        "gptj",
        scaled("transformer.h.1.attn.embed_positions", 0.5),
        r"transformer\.h\.1\.attn\.embed_positions is 0\.5 at \[0, 4\] \(the config's: 1\)",
    ),
    (
        "is_causal",
        "llama",
        sets("model.layers.0.self_attn.is_causal", False),
        r"model\.layers\.0\.self_attn\.is_causal is False \(the config's: True\)",
    ),
    ("groups", "llama", sets("model.layers.2.self_attn.num_key_value_groups", 1), r"num_key_value_groups is 1 \("),
    (
        "window",
        "qwen2-windowed",
        longer_window,
        r"model\.layers\.1\.self_attn\.sliding_window is 12 \(the config's: 7\)",
    ),
    ("norm", "llama", other_norm, r"model\.norm is a LayerNorm \(the config's: LlamaRMSNorm\)"),
    (
        "do_layer_norm_before",
        "opt",
        sets("model.decoder.layers.1.do_layer_norm_before", False),
        r"layers\.1\.do_layer_norm_before is False \(the config's: True\)",
    ),
    (
        "offset",
        "opt",
        sets("model.decoder.embed_positions.offset", 0),
        r"embed_positions\.offset is 0 \(the config's: 2",
    ),
    (
        "max_norm",
        "opt",
        sets("model.decoder.embed_tokens.max_norm", 0.1),
        r"embed_tokens\.max_norm is 0\.1 \(.*: None\)",
    ),
    ("window mask", "gpt-neo", wider_window, r"transformer\.h\.1\.attn\.attention\.bias differs from the config's"),
    (
        "inv_norm_factor",
        "bloom",
        sets("transformer.h.0.self_attention.inv_norm_factor", 1.0),
        r"inv_norm_factor is 1 \(",
    ),
    (
        "residual",
        "bloom",
        sets("transformer.h.2.apply_residual_connection_post_layernorm", True),
        r"h\.2\.apply_residual_connection_post_layernorm is True \(the config's: False\)",
    ),
    (
        "use_parallel_residual",
        "gpt-neox-parallel",
        sets("gpt_neox.layers.0.use_parallel_residual", False),
        r"gpt_neox\.layers\.0\.use_parallel_residual is False \(the config's: True\)",
    ),
    (
        "scale_attn",
        "gptj",
        sets("transformer.h.0.attn.scale_attn", 1.0),
        r"attn\.scale_attn is 1 \(the config's: 4\.47",
    ),
    ("scale as a tensor", "gpt2", sets("transformer.h.0.attn.scaling", torch.ones(1)), r"attn\.scaling is a Tensor \("),
]


@pytest.mark.parametrize(
    ("name", "change", "expected"), [case[1:] for case in CHANGES], ids=[case[0] for case in CHANGES]
)
def test_a_table_or_attribute_that_differs_from_the_config_is_refused(
    name: str, change: Callable[[PreTrainedModel], None], expected: str
) -> None:
    model = small_model(name)
    change(model)
    with pytest.raises(UserError, match=expected):
        labkit.init_inference(model)


def test_an_attribute_of_an_encoder_is_refused_in_its_layers_only() -> None:
    model = copy.deepcopy(encoders.vanilla("bert"))
    model.embeddings.LayerNorm.eps = 0.1
    refuse_what_differs(model)
    model.encoder.layer[1].attention.self.scaling = 1.0
    with pytest.raises(UserError, match=r"encoder\.layer\.1\.attention\.self\.scaling is 1 \(the config's: 0\.2236"):
        labkit.init_inference(model)


def test_longrope_with_one_set_of_factors_is_not_refused_after_a_long_text() -> None:
    factors = [1.0 + 0.5 * index for index in range(10)]
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 8,
    }
    model = small_model("llama", rope_parameters=rope)
    with torch.no_grad():
        model(prompt(1, 12))
    refuse_what_differs(model)


def test_the_model_of_the_config_takes_no_memory_and_leaves_config_and_random_numbers() -> None:
    model = small_model("gpt2")
    before, state = model.config.to_dict(), torch.random.get_rng_state()
    refuse_what_differs(model)
    assert model.config.to_dict() == before
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_config_that_gives_no_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("gpt2")

    def failing(config: PretrainedConfig, **_: object) -> PreTrainedModel:
        raise ValueError("no such attention")

    monkeypatch.setattr(type(model), "_from_config", failing)
    with pytest.raises(
        UserError, match=r"transformers makes no GPT2LMHeadModel of the model's config \(no such attention"
    ):
        labkit.init_inference(model)
