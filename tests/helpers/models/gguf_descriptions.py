"""What llama.cpp's converter writes for models of each architecture: metadata, and the rows of the tensors."""

from __future__ import annotations

import math
from typing import Any

import gguf
import torch
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
_LONG_ROPE = {
    "type": "longrope",
    "short_factor": [1.0 + index / 8 for index in range(9)],
    "long_factor": [1.0 + 3 * index for index in range(9)],
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
    "phi4-mini": (
        "phi3",
        _WIDE | {"original_max_position_embeddings": 32, "partial_rotary_factor": 0.75, "rope_scaling": _LONG_ROPE},
    ),
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
_EXPERTS: dict[str, Any] = {"num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": 2}
# Models with experts, which have rows.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", _WIDE | {"num_hidden_layers": 2, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "qwen2_moe",
        _WIDE | _EXPERTS | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
    ),
    "qwen3-moe": (
        "qwen3_moe",
        _WIDE | _EXPERTS | {"head_dim": 32, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "olmoe": ("olmoe", _WIDE | _EXPERTS),
    "gpt-oss": (
        "gpt_oss",
        _WIDE
        | {"num_hidden_layers": 2, "num_local_experts": 6, "num_experts_per_tok": 2}
        | {"head_dim": 24, "sliding_window": 16},
    ),
    "granite-moe": (
        "granitemoe",
        _WIDE | _SCALES | {"num_hidden_layers": 2, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
}
_ARCHITECTURES = {
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "cohere": "command-r",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
_LAYER_NORMS = {
    "gpt2": "layer_norm_epsilon",
    "bloom": "layer_norm_epsilon",
    "starcoder2": "norm_epsilon",
    "stablelm": "layer_norm_eps",
    "cohere": "layer_norm_eps",
    "nemotron": "norm_eps",
}
_WINDOWED = ("gemma2", "gemma3_text", "phi3", "olmo3", "gpt_oss")
_PAIRS_TOGETHER = ("llama", "mixtral", "granite", "granitemoe", "smollm3")
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
    if (window := getattr(config, "sliding_window", None)) and kind in _WINDOWED:
        writer.add_sliding_window(window)
    if kind == "olmo3":
        writer.add_sliding_window_pattern([layer == "sliding_attention" for layer in config.layer_types])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if kind in ("gemma2", "gemma3_text"):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    if kind in ("qwen2_moe", "qwen3_moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if kind == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if kind in ("granite", "granitemoe"):
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


def stored_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model, with the gate and the up projection of experts apart, under names that gguf maps."""
    if any(name.endswith(".sinks") for name in tensors):
        return _stored_of_gpt_oss(tensors)
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        name = name.replace("block_sparse_moe.experts", "mlp.experts").replace("block_sparse_moe.router", "mlp.gate")
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            begin = name.removesuffix("gate_up_proj")
            stored |= {f"{begin}gate_proj.weight": gate, f"{begin}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            stored[f"{name}.weight"] = tensor
        else:
            stored[name] = tensor.squeeze() if name.endswith("shared_expert_gate.weight") else tensor
    return stored


def _stored_of_gpt_oss(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same of GPT-OSS, whose stacks are transposed, and whose rows of gate and up alternate."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
        rows = tensor.transpose(1, 2) if tensor.ndim == 3 else tensor
        if stem.endswith("gate_up_proj"):
            begin = stem.removesuffix("gate_up_proj")
            stored |= {f"{begin}gate_proj.{kind}": rows[:, ::2], f"{begin}up_proj.{kind}": rows[:, 1::2]}
        elif stem.endswith("experts.down_proj"):
            stored[f"{stem}.{kind}"] = rows
        else:
            stored[f"{name}.weight" if name.endswith(".sinks") else name] = tensor
    return stored


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
