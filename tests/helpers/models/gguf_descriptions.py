"""What llama.cpp's converter writes for models of each architecture: metadata, and the rows of the tensors."""

from __future__ import annotations

from typing import Any

import gguf
from torch import Tensor
from transformers import PretrainedConfig

_WIDE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_SCALES = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 1.6,
}
# Models whose rows are derived, by a name: transformers' type, and the fields of its config.
DERIVED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        _WIDE
        | {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
        | {"final_logit_softcapping": 20.0},
    ),
    "phi3": ("phi3", _WIDE | {"sliding_window": 24, "original_max_position_embeddings": 512}),
    "olmo2": ("olmo2", _WIDE),
    "olmo3": ("olmo3", _WIDE | {"sliding_window": 16}),
    "granite": ("granite", _WIDE | _SCALES),
    "smollm3": ("smollm3", _WIDE | {"num_hidden_layers": 5}),
    "starcoder2": ("starcoder2", _WIDE | {"sliding_window": None}),
    "stablelm": ("stablelm", _WIDE | {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", _WIDE | {"use_parallel_residual": True}),
    "command-r": ("cohere", _WIDE | {"logit_scale": 0.1}),
    "glm4": ("glm4", _WIDE | {"head_dim": 24, "attention_bias": True}),
    "seed_oss": ("seed_oss", _WIDE | {"head_dim": 24}),
    "nemotron": ("nemotron", _WIDE | {"head_dim": 24, "partial_rotary_factor": 0.5}),
}
_ARCHITECTURES = {"gemma3_text": "gemma3", "olmo3": "olmo2", "cohere": "command-r"}
_LAYER_NORMS = {
    "gpt2": "layer_norm_epsilon",
    "bloom": "layer_norm_epsilon",
    "starcoder2": "norm_epsilon",
    "stablelm": "layer_norm_eps",
    "cohere": "layer_norm_eps",
    "nemotron": "norm_eps",
}
_PAIRS_TOGETHER = ("llama", "granite", "smollm3")
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
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    _describe_heads(writer, config)
    if (window := getattr(config, "sliding_window", None)) and kind in ("gemma2", "gemma3_text", "phi3", "olmo3"):
        writer.add_sliding_window(window)
    if kind == "olmo3":
        writer.add_sliding_window_pattern([layer == "sliding_attention" for layer in config.layer_types])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if kind in ("gemma2", "gemma3_text"):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind == "granite":
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
