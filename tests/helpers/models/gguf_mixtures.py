"""What llama.cpp's converter writes for mixtures of experts: metadata, and the tensors of experts."""

from __future__ import annotations

from typing import Any

import gguf
from torch import Tensor
from transformers import PretrainedConfig

WIDE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
SCALES = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 1.6,
}
_EXPERTS: dict[str, Any] = {"num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": 2}
# Models with experts, which have rows.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", WIDE | {"num_hidden_layers": 2, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "qwen2_moe",
        WIDE | _EXPERTS | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
    ),
    "qwen3-moe": (
        "qwen3_moe",
        WIDE | _EXPERTS | {"head_dim": 32, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "olmoe": ("olmoe", WIDE | _EXPERTS),
    "gpt-oss": (
        "gpt_oss",
        WIDE
        | {"num_hidden_layers": 2, "num_local_experts": 6, "num_experts_per_tok": 2}
        | {"head_dim": 24, "sliding_window": 16},
    ),
    "granite-moe": (
        "granitemoe",
        WIDE | SCALES | {"num_hidden_layers": 2, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
}
_ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_SCALED: dict[str, Any] = {"routed_scaling_factor": 2.5, "norm_topk_prob": True}
_GLM = WIDE | _ROUTED | _SCALED | {"head_dim": 32, "n_routed_experts": 6, "num_mtp_layers": 0}
# Mixtures whose rows are derived.
DERIVED_MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm-4.5": ("glm4_moe", _GLM | {"first_k_dense_replace": 2, "attention_bias": True, "use_qk_norm": True}),
    "glm-4.5-air": ("glm4_moe", _GLM | {"attention_bias": True}),
    "solar-open": ("solar_open", _GLM),
    "dots1": (
        "dots1",
        WIDE
        | _ROUTED
        | {"num_key_value_heads": 4, "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1}
        | {"routed_scaling_factor": 1.5},
    ),
    "ernie-4.5": (
        "ernie4_5_moe",
        WIDE
        | {"intermediate_size": 128, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32}
        | {"moe_layer_start_index": 1},
    ),
    "exaone": (
        "exaone_moe",
        WIDE | _ROUTED | _SCALED | {"num_hidden_layers": 5, "head_dim": 24, "num_experts": 6, "sliding_window": 16},
    ),
    "granite-moe-shared": (
        "granitemoeshared",
        WIDE | SCALES | {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 128},
    ),
    "minimax-m2": (
        "minimax_m2",
        WIDE
        | {"intermediate_size": 64, "head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 2}
        | {"rotary_dim": 16},
    ),
}
_FIRST_DENSE = ("first_k_dense_replace", "moe_layer_start_index")
_SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SIGMOID = ("glm4_moe", "solar_open", "dots1", "exaone_moe", "minimax_m2")
CHOICE_BIAS = "e_score_correction_bias"


def _first_of(config: PretrainedConfig, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def describe_experts(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """Writes the metadata of a mixture, if the config describes one."""
    kind = config.model_type
    experts = _first_of(config, ("num_local_experts", "num_experts", "n_routed_experts"))
    if not experts:
        return
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if (inner := getattr(config, "moe_intermediate_size", None)) is not None:
        writer.add_expert_feed_forward_length(inner)
    if kind in ("gpt_oss", "minimax_m2"):
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if kind == "gpt_oss":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    if kind == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if kind == "granitemoeshared":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if (groups := getattr(config, "n_group", None)) is not None:
        writer.add_expert_group_count(groups)
        writer.add_expert_group_used_count(config.topk_group)
    if (dense := _first_of(config, _FIRST_DENSE)) is not None:
        writer.add_leading_dense_block_count(dense)
    if (shared := _first_of(config, _SHARED_COUNT)) is not None:
        writer.add_expert_shared_count(shared)
    if kind in _SIGMOID:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)
    if kind == "exaone_moe":
        writer.add_expert_shared_feed_forward_length(inner * shared)
        writer.add_nextn_predict_layers(0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if (factor := getattr(config, "routed_scaling_factor", None)) is not None:
        writer.add_expert_weights_scale(factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)


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
        elif name.endswith("shared_mlp.input_linear.weight"):
            gate, up = tensor.chunk(2)
            begin = name.replace("shared_mlp.input_linear.weight", "mlp.shared_experts")
            stored |= {f"{begin}.gate_proj.weight": gate, f"{begin}.up_proj.weight": up}
        elif name.endswith(CHOICE_BIAS):
            stored[f"{name.partition('.mlp.')[0]}.mlp.gate.e_score_correction.bias"] = tensor
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
