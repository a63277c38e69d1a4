"""Reads the config of a model with experts into the fields of `ModelConfig`."""

from __future__ import annotations

from transformers import PretrainedConfig

from labkit.kernels.mlp_gemm.reference import SWIGLU_LIMIT, SWIGLU_SLOPE
from labkit.models.config import ExpertsSpec
from labkit.models.hf_config import Fields, layer_windows, llama_like


def has_experts_everywhere(hf: PretrainedConfig) -> bool:
    """Whether the readers here describe the model: all its layers have experts, queries are not clipped, and its
    outputs have no logits of the router.
    """
    expected = {"decoder_sparse_step": 1, "mlp_only_layers": [], "clip_qkv": None, "output_router_logits": False}
    return all(getattr(hf, name, value) == value for name, value in expected.items())


def read_mixtral(hf: PretrainedConfig) -> Fields:
    return llama_like(
        hf,
        windows=(hf.sliding_window,) * hf.num_hidden_layers,
        experts=ExpertsSpec(hf.num_local_experts, hf.num_experts_per_tok, renormalised=True),
    )


def read_qwen2_moe(hf: PretrainedConfig) -> Fields:
    """Qwen2-MoE: a gated shared expert, which every row passes, adds its output."""
    shared = hf.shared_expert_intermediate_size
    return _qwen_moe(
        hf,
        biases=frozenset({"qkv"} if hf.qkv_bias else ()),
        windows=layer_windows(hf),
        experts=ExpertsSpec(
            hf.num_experts, hf.num_experts_per_tok, bool(hf.norm_topk_prob), shared=shared, shared_gate=True
        ),
    )


def read_qwen3_moe(hf: PretrainedConfig) -> Fields:
    return _qwen_moe(
        hf,
        biases=frozenset({"qkv", "attn_out"} if hf.attention_bias else ()),
        windows=(hf.sliding_window,) * hf.num_hidden_layers,
        qk_norm=True,
        experts=ExpertsSpec(hf.num_experts, hf.num_experts_per_tok, bool(hf.norm_topk_prob)),
    )


def read_olmoe(hf: PretrainedConfig) -> Fields:
    """OLMoE: queries and keys of all heads together have a norm."""
    return llama_like(
        hf,
        biases=frozenset({"qkv", "attn_out"} if hf.attention_bias else ()),
        qk_norm=True,
        qk_norm_whole=True,
        experts=ExpertsSpec(hf.num_experts, hf.num_experts_per_tok, bool(hf.norm_topk_prob)),
    )


def read_granitemoe(hf: PretrainedConfig) -> Fields:
    """Granite-MoE. The softmax over the chosen logits is that over all of them, renormalised."""
    return llama_like(
        hf,
        biases=frozenset({"qkv", "attn_out"} if hf.attention_bias else ()),
        scales=(float(hf.attention_multiplier),) * hf.num_hidden_layers,
        embedding_scale=float(hf.embedding_multiplier),
        residual_scale=float(hf.residual_multiplier),
        logit_scale=1 / hf.logits_scaling,
        experts=ExpertsSpec(hf.num_local_experts, hf.num_experts_per_tok, renormalised=True),
    )


def computes_gpt_oss(hf: PretrainedConfig) -> bool:
    """Whether `read_gpt_oss` describes the model: the kernels have the published numbers of its activation."""
    numbers = (getattr(hf, "swiglu_alpha", SWIGLU_SLOPE), getattr(hf, "swiglu_limit", SWIGLU_LIMIT))
    return numbers == (SWIGLU_SLOPE, SWIGLU_LIMIT) and has_experts_everywhere(hf)


def read_gpt_oss(hf: PretrainedConfig) -> Fields:
    """GPT-OSS: attention sinks, a router and experts with biases, and a clamped activation of its own. The softmax over
    the chosen logits is that over all of them, renormalised.
    """
    attention = {"qkv", "attn_out"} if hf.attention_bias else set()
    fields = llama_like(
        hf,
        windows=layer_windows(hf),
        biases=frozenset(attention | {"router", "ff1", "ff2"}),
        attention_sinks=True,
        experts=ExpertsSpec(hf.num_local_experts, hf.num_experts_per_tok, renormalised=True),
    )
    return fields | {"activation": "clamped_swiglu"}


def _qwen_moe(hf: PretrainedConfig, **fields: object) -> Fields:
    return llama_like(hf, intermediate_size=hf.moe_intermediate_size, **fields)
