"""What llama.cpp's converter writes for models of each architecture: metadata, and the rows of the tensors."""

from __future__ import annotations

import math
from typing import Any

import gguf
import torch
from helpers.models.gguf_mixtures import SCALES, WIDE, describe_experts
from torch import Tensor
from transformers import PretrainedConfig

_LONG_ROPE = {
    "type": "longrope",
    "short_factor": [1.0 + index / 8 for index in range(9)],
    "long_factor": [1.0 + 3 * index for index in range(9)],
}
# Models whose rows are derived, by a name: transformers' type, and the fields of its config.
DERIVED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        WIDE
        | {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
        | {"final_logit_softcapping": 20.0},
    ),
    "phi3": ("phi3", WIDE | {"sliding_window": 24, "original_max_position_embeddings": 512}),
    "phi4-mini": (
        "phi3",
        WIDE | {"original_max_position_embeddings": 32, "partial_rotary_factor": 0.75, "rope_scaling": _LONG_ROPE},
    ),
    "olmo2": ("olmo2", WIDE),
    "olmo3": ("olmo3", WIDE | {"sliding_window": 16}),
    "granite": ("granite", WIDE | SCALES),
    "smollm3": ("smollm3", WIDE | {"num_hidden_layers": 5}),
    "starcoder2": ("starcoder2", WIDE | {"sliding_window": None}),
    "stablelm": ("stablelm", WIDE | {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", WIDE | {"use_parallel_residual": True}),
    "command-r": ("cohere", WIDE | {"logit_scale": 0.1}),
    "glm4": ("glm4", WIDE | {"head_dim": 24, "attention_bias": True}),
    "seed_oss": ("seed_oss", WIDE | {"head_dim": 24}),
    "nemotron": ("nemotron", WIDE | {"head_dim": 24, "partial_rotary_factor": 0.5}),
}
_ARCHITECTURES = {
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "cohere": "command-r",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "glm4_moe": "glm4moe",
    "solar_open": "glm4moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone_moe": "exaone-moe",
    "granitemoeshared": "granitemoe",
    "minimax_m2": "minimax-m2",
}
_LAYER_NORMS = {
    "gpt2": "layer_norm_epsilon",
    "bloom": "layer_norm_epsilon",
    "starcoder2": "norm_epsilon",
    "stablelm": "layer_norm_eps",
    "cohere": "layer_norm_eps",
    "nemotron": "norm_eps",
}
_WINDOWED = ("gemma2", "gemma3_text", "phi3", "olmo3", "gpt_oss", "exaone_moe")
_PAIRS_TOGETHER = ("llama", "mixtral", "granite", "granitemoe", "granitemoeshared", "smollm3")
_ADDED_TO_NORMS = ("gemma2", "gemma3_text", "nemotron")


def architecture_of(config: PretrainedConfig) -> str:
    """GGUF's name of a config's architecture."""
    return _ARCHITECTURES.get(config.model_type, config.model_type)


def describe(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """Writes the metadata of a config."""
    kind = config.model_type
    writer.add_context_length(getattr(config, "max_position_embeddings", 192))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if kind in _LAYER_NORMS:
        writer.add_layer_norm_eps(getattr(config, _LAYER_NORMS[kind]))
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if kind in ("gpt2", "bloom"):
        writer.add_feed_forward_length(getattr(config, "n_inner", None) or 4 * config.hidden_size)
        return
    if hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    _describe_heads(writer, config)
    if (window := getattr(config, "sliding_window", None)) and kind in _WINDOWED:
        writer.add_sliding_window(window)
    if kind in ("olmo3", "exaone_moe"):
        writer.add_sliding_window_pattern([layer == "sliding_attention" for layer in config.layer_types])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if kind in ("gemma2", "gemma3_text"):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    describe_experts(writer, config)
    if kind in ("granite", "granitemoe", "granitemoeshared"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind == "cohere":
        writer.add_logit_scale(config.logit_scale)
    if kind == "stablelm":
        writer.add_parallel_residual(config.use_parallel_residual)


def _describe_heads(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "longrope":
        original, scale = rope["original_max_position_embeddings"], config.max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors((1 + math.log(scale / original) / math.log(original)) ** 0.5)


def long_rope_factors(config: PretrainedConfig) -> dict[str, Tensor]:
    """The tensors with the factors of a rotation that is another one in long texts."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return {}
    return {f"rope_factors_{length}.weight": torch.tensor(rope[f"{length}_factor"]) for length in ("long", "short")}


def stored_rows(config: PretrainedConfig, name: str, tensor: Tensor) -> Tensor:
    """A tensor of the model, as the converter writes it."""
    if config.model_type in _PAIRS_TOGETHER and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    if config.model_type in _ADDED_TO_NORMS and name.endswith("norm.weight"):
        return tensor + 1
    if config.model_type == "bloom" and ".query_key_value." in name:
        return tensor.unflatten(0, (config.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
    return tensor
