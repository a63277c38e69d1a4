"""One row per architecture: how a Hugging Face config and its tensors become a `ModelConfig` and canonical weights.

A row names the modules of its model by role. The same names find the tensors in a checkpoint and place the stage
annotations on a vanilla model. Adding an architecture is a new row, usually a `replace` of a close relative.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from transformers import PretrainedConfig

from labkit.models.config import ModelConfig
from labkit.models.expert_names import ExpertNames
from labkit.models.hf_config import (
    read_bloom,
    read_gemma2,
    read_gpt2,
    read_gpt_neo,
    read_gpt_neox,
    read_gptj,
    read_llama,
    read_mistral,
    read_opt,
    read_qwen2,
    read_qwen3,
)
from labkit.models.mixture_configs import (
    computes_gpt_oss,
    has_experts_everywhere,
    read_gpt_oss,
    read_granitemoe,
    read_mixtral,
    read_olmoe,
    read_qwen2_moe,
    read_qwen3_moe,
)
from labkit.models.policy import Policy
from labkit.system.errors import UserError

GPT2 = Policy(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    read=read_gpt2,
    layers="transformer.h",
    norm1="ln_1",
    qkv=("attn.c_attn",),
    attn_out="attn.c_proj",
    norm2="ln_2",
    ff1=("mlp.c_fc",),
    ff2="mlp.c_proj",
    tokens="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    transposed=True,
    token_types=True,
)
GPTJ = replace(
    GPT2,
    architecture="GPTJForCausalLM",
    model_type="gptj",
    read=read_gptj,
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    attn_out="attn.out_proj",
    norm2=None,
    ff1=("mlp.fc_in",),
    ff2="mlp.fc_out",
    positions=None,
    transposed=False,
)
GPT_NEO = replace(
    GPT2,
    architecture="GPTNeoForCausalLM",
    model_type="gpt_neo",
    read=read_gpt_neo,
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    attn_out="attn.attention.out_proj",
    transposed=False,
)
GPT_NEOX = Policy(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    read=read_gpt_neox,
    layers="gpt_neox.layers",
    norm1="input_layernorm",
    qkv=("attention.query_key_value",),
    attn_out="attention.dense",
    norm2="post_attention_layernorm",
    ff1=("mlp.dense_h_to_4h",),
    ff2="mlp.dense_4h_to_h",
    tokens="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    interleaved_qkv=True,
    renamed=(("embed_out", "lm_head"),),
)
BLOOM = replace(
    GPT_NEOX,
    architecture="BloomForCausalLM",
    model_type="bloom",
    read=read_bloom,
    layers="transformer.h",
    qkv=("self_attention.query_key_value",),
    attn_out="self_attention.dense",
    tokens="transformer.word_embeddings",
    embed_norm="transformer.word_embeddings_layernorm",
    final_norm="transformer.ln_f",
    renamed=(),
    positions_from_mask=True,
)
OPT = Policy(
    architecture="OPTForCausalLM",
    model_type="opt",
    read=read_opt,
    layers="model.decoder.layers",
    norm1="self_attn_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attn_out="self_attn.out_proj",
    norm2="final_layer_norm",
    ff1=("fc1",),
    ff2="fc2",
    tokens="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    project_in="model.decoder.project_in",
    final_norm="model.decoder.final_layer_norm",
    project_out="model.decoder.project_out",
    positions_from_mask=True,
)
LLAMA = Policy(
    architecture="LlamaForCausalLM",
    model_type="llama",
    read=read_llama,
    layers="model.layers",
    norm1="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attn_out="self_attn.o_proj",
    norm2="post_attention_layernorm",
    ff1=("mlp.gate_proj", "mlp.up_proj"),
    ff2="mlp.down_proj",
    tokens="model.embed_tokens",
    final_norm="model.norm",
)
MISTRAL = replace(LLAMA, architecture="MistralForCausalLM", model_type="mistral", read=read_mistral)
QWEN2 = replace(LLAMA, architecture="Qwen2ForCausalLM", model_type="qwen2", read=read_qwen2)
QWEN3 = replace(
    LLAMA,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    read=read_qwen3,
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
)
GEMMA2 = replace(
    LLAMA,
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    read=read_gemma2,
    attn_out_norm="post_attention_layernorm",
    norm2="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)

EXPERTS_OF_QWEN = ExpertNames(
    stacks=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    apart=(("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), "mlp.experts.{}.down_proj"),
)
QWEN3_MOE = replace(
    QWEN3,
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    read=read_qwen3_moe,
    ff1=("mlp.experts",),
    ff2="mlp.experts",
    router="mlp.gate",
    experts=EXPERTS_OF_QWEN,
    covers=has_experts_everywhere,
)
OLMOE = replace(QWEN3_MOE, architecture="OlmoeForCausalLM", model_type="olmoe", read=read_olmoe)
QWEN2_MOE = replace(
    QWEN3_MOE,
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    read=read_qwen2_moe,
    q_norm=None,
    k_norm=None,
    shared_ff1=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_ff2="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
)
MIXTRAL = replace(
    QWEN2_MOE,
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    read=read_mixtral,
    shared_ff1=(),
    shared_ff2="",
    shared_gate="",
    experts=replace(EXPERTS_OF_QWEN, apart=(("mlp.experts.{}.w1", "mlp.experts.{}.w3"), "mlp.experts.{}.w2")),
    renamed_in_layer=(("block_sparse_moe.", "mlp."),),
)
GPT_OSS = replace(
    MIXTRAL,
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    read=read_gpt_oss,
    router="mlp.router",
    sinks="self_attn.sinks",
    experts=ExpertNames(
        stacks=EXPERTS_OF_QWEN.stacks,
        apart=((), "mlp.experts.{}"),  # no checkpoint has them
        alternating=True,
    ),
    renamed_in_layer=(),
    covers=computes_gpt_oss,
)
GRANITE_MOE = replace(
    MIXTRAL,
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    read=read_granitemoe,
    ff1=("block_sparse_moe.experts",),
    ff2="block_sparse_moe.experts",
    router="block_sparse_moe.router",
    experts=ExpertNames(
        stacks=("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
        apart=((), "block_sparse_moe.experts.{}"),  # no checkpoint has them
    ),
    renamed_in_layer=(
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
        ("block_sparse_moe.router.layer.", "block_sparse_moe.router."),
    ),
)

POLICIES: dict[str, Policy] = {
    policy.architecture: policy
    for policy in (
        *(GPT2, GPTJ, GPT_NEO, GPT_NEOX, BLOOM, OPT, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2),
        *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, GPT_OSS),
    )
}


def find_policy(hf_config: PretrainedConfig) -> Policy | None:
    """The row of a Hugging Face config, as in `policy_for`; None: it has no row."""
    policy = next((policy for policy in POLICIES.values() if policy.model_type == hf_config.model_type), None)
    return policy if policy is not None and policy.covers(hf_config) else None


def policy_for(hf_config: PretrainedConfig, also: Iterable[str] = ()) -> Policy:
    """The row of a Hugging Face config, by its model type, as transformers itself picks the class: old configs have
    other names of architectures, such as LLaMAForCausalLM or BloomModel.

    A class without a row of its own gets the one that is derived from it, which `init_inference` proves.

    Raises UserError for a config without a row. `also`: further architectures that the caller takes; the error lists
    them.
    """
    if policy := find_policy(hf_config):
        return policy
    from labkit.models.derived.row import NotRecognised, derived_policy

    try:
        return derived_policy(hf_config)
    except NotRecognised as error:
        named = getattr(hf_config, "architectures", None) or []
        unknown = " ".join([", ".join(named), f"of model type {hf_config.model_type!r}"]).strip()
        known = ", ".join((*POLICIES, *also))
        raise UserError(
            f"unknown architecture {unknown}, from whose class no row can be derived ({error}); expected one of {known}"
        ) from None


def known_policy(hf_config: PretrainedConfig) -> Policy | None:
    """As `policy_for`; None for a config without a row."""
    try:
        return policy_for(hf_config)
    except UserError:
        return None


def model_config_of(hf_config: PretrainedConfig) -> ModelConfig:
    """The engine's description of the model of a Hugging Face config. Raises UserError as `policy_for` does, and for a
    field that is wrong or not supported.
    """
    return policy_for(hf_config).model_config(hf_config)
