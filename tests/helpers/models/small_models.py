"""Small random models for every policy row, with unusual shapes.

Heads of 20, three KV heads, three ALiBi heads, windows shorter than the text, widths that no tile divides. No weight
is trivial: norm weights and all biases are random too, so that a forgotten one shows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.pytorch_utils import Conv1D

from labkit.models.policies import model_config_of

VOCAB = 131
POSITIONS = 192
WINDOW = 7
TOKENS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}

GPT2 = partial(GPT2Config, **TOKENS, n_embd=60, n_head=3, n_layer=3, n_positions=POSITIONS)
GPTJ = partial(GPTJConfig, **TOKENS, n_embd=60, n_head=3, n_layer=3, n_positions=POSITIONS, n_inner=100)
NEO = partial(GPTNeoConfig, **TOKENS, hidden_size=60, num_heads=3, max_position_embeddings=POSITIONS)
NEOX = partial(
    GPTNeoXConfig,
    **TOKENS,
    hidden_size=60,
    num_attention_heads=3,
    num_hidden_layers=3,
    intermediate_size=100,
    max_position_embeddings=POSITIONS,
)
BLOOM = partial(BloomConfig, **TOKENS, hidden_size=60, n_head=3, n_layer=3)
OPT = partial(
    OPTConfig,
    **TOKENS,
    hidden_size=60,
    num_attention_heads=3,
    num_hidden_layers=3,
    ffn_dim=100,
    max_position_embeddings=POSITIONS,
)
GROUPED: dict[str, Any] = {
    **TOKENS,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 3,
    "intermediate_size": 100,
    "max_position_embeddings": POSITIONS,
}
LLAMA = partial(LlamaConfig, **GROUPED, hidden_size=72, head_dim=20)
MISTRAL = partial(MistralConfig, **GROUPED, hidden_size=72, head_dim=20)
QWEN2 = partial(Qwen2Config, **GROUPED, hidden_size=120)
QWEN3 = partial(Qwen3Config, **GROUPED, hidden_size=72, head_dim=20)
GEMMA2 = partial(
    Gemma2Config,
    **GROUPED,
    hidden_size=72,
    head_dim=20,
    sliding_window=WINDOW,
    query_pre_attn_scalar=15,
    attn_logit_softcapping=3.0,
    final_logit_softcapping=2.0,
)

MIXTRAL = partial(
    MixtralConfig,
    **GROUPED | {"intermediate_size": 56},
    hidden_size=72,
    head_dim=20,
    num_local_experts=5,
    num_experts_per_tok=2,
)
QWEN2_MOE = partial(
    Qwen2MoeConfig,
    **GROUPED,
    hidden_size=120,
    moe_intermediate_size=56,
    shared_expert_intermediate_size=44,
    num_experts=7,
    num_experts_per_tok=3,
)
QWEN3_MOE = partial(
    Qwen3MoeConfig,
    **GROUPED,
    hidden_size=72,
    head_dim=20,
    moe_intermediate_size=56,
    num_experts=6,
    num_experts_per_tok=2,
)
OLMOE = partial(
    OlmoeConfig, **GROUPED | {"intermediate_size": 56}, hidden_size=120, num_experts=6, num_experts_per_tok=3
)
GRANITE_MOE = partial(
    GraniteMoeConfig,
    **GROUPED | {"intermediate_size": 56},
    hidden_size=120,
    num_local_experts=4,
    num_experts_per_tok=2,
    embedding_multiplier=3.0,
    attention_multiplier=0.3,
    residual_multiplier=0.5,
    logits_scaling=2.0,
)

LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 48}
GPT_OSS = partial(
    GptOssConfig,
    **GROUPED | {"intermediate_size": 56},
    hidden_size=72,
    head_dim=20,
    num_local_experts=5,
    num_experts_per_tok=2,
    sliding_window=WINDOW,
    rope_parameters=YARN_ROPE | {"truncate": False},
)

SMALL_CONFIGS: dict[str, Callable[..., PretrainedConfig]] = {
    "gpt2": GPT2,
    "gpt2-untied": partial(
        GPT2,
        n_inner=100,
        activation_function="relu",
        scale_attn_by_inverse_layer_idx=True,
        tie_word_embeddings=False,
    ),
    "gptj": partial(GPTJ, rotary_dim=8),
    "gptj-tied": partial(GPTJ, rotary_dim=20, tie_word_embeddings=True),
    "gpt-neo": partial(NEO, num_layers=4, attention_types=[[["global", "local"], 2]], window_size=WINDOW),
    "gpt-neo-global": partial(NEO, num_layers=3, attention_types=[[["global"], 3]], intermediate_size=100),
    "gpt-neox-parallel": partial(NEOX, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25}),
    "gpt-neox-sequential": partial(
        NEOX,
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 1.0},
        use_parallel_residual=False,
        attention_bias=False,
        hidden_act="gelu_new",
        tie_word_embeddings=True,
    ),
    "bloom": BLOOM,
    "bloom-normed-residual": partial(BLOOM, n_head=5, apply_residual_connection_post_layernorm=True),
    "opt": OPT,
    "opt-post-norm": partial(OPT, do_layer_norm_before=False, word_embed_proj_dim=36),
    "opt-no-bias": partial(OPT, enable_bias=False, word_embed_proj_dim=36, activation_function="gelu"),
    "llama": LLAMA,
    "llama-biased": partial(
        LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_parameters=LINEAR_ROPE
    ),
    "llama3": partial(LLAMA, rope_parameters=LLAMA3_ROPE, hidden_act="gelu_new"),
    "llama-yarn": partial(LLAMA, rope_parameters=YARN_ROPE),
    "mistral": partial(MISTRAL, sliding_window=WINDOW),
    "qwen2": partial(QWEN2, tie_word_embeddings=True),
    "qwen2-windowed": partial(QWEN2, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": QWEN3,
    "qwen3-biased": partial(
        QWEN3,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=True,
    ),
    "gemma2": GEMMA2,
    "gemma2-biased": partial(
        GEMMA2,
        attention_bias=True,
        query_pre_attn_scalar=30,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        hidden_activation="silu",
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters=LINEAR_ROPE,
        tie_word_embeddings=False,
    ),
    "mixtral": MIXTRAL,
    "mixtral-windowed": partial(MIXTRAL, sliding_window=WINDOW, num_experts_per_tok=3, tie_word_embeddings=True),
    "qwen2-moe": QWEN2_MOE,
    "qwen3-moe": partial(QWEN3_MOE, norm_topk_prob=True),
    "qwen3-moe-shares": partial(
        QWEN3_MOE, num_experts_per_tok=1, attention_bias=True, use_sliding_window=True, sliding_window=WINDOW
    ),
    "olmoe": OLMOE,
    "granite-moe": GRANITE_MOE,
    "gpt-oss": GPT_OSS,
    "gpt-oss-plain": partial(GPT_OSS, attention_bias=False, num_experts_per_tok=3, tie_word_embeddings=True),
}


WITH_EXPERTS = (
    *("mixtral", "mixtral-windowed", "qwen2-moe", "qwen3-moe", "qwen3-moe-shares", "olmoe", "granite-moe"),
    *("gpt-oss", "gpt-oss-plain"),
)
DENSE = [name for name in SMALL_CONFIGS if name not in WITH_EXPERTS]
# Rounding changes the choice of experts where two are nearly equal, and so the logits at once. Not if all are chosen.
ALL_EXPERTS: dict[str, Any] = {
    name: {"num_experts_per_tok": experts.count}
    for name in WITH_EXPERTS
    if (experts := model_config_of(SMALL_CONFIGS[name]()).experts)
}


def small_config(name: str, **overrides: object) -> PretrainedConfig:
    return SMALL_CONFIGS[name](**overrides)


def small_model(
    name: str, *, seed: int = 5, dtype: torch.dtype = torch.float32, **overrides: object
) -> PreTrainedModel:
    """A vanilla model with the same weights on every call."""
    model = AutoModelForCausalLM.from_config(small_config(name, **overrides), dtype=torch.float32)
    return randomised(model, seed).to(dtype)


def randomised(model: PreTrainedModel, seed: int = 5) -> PreTrainedModel:
    """Gives the model weights with which it attends unevenly and does not just repeat its last token.

    Small embeddings and large linears let the layers decide the next token, even if the head is tied.
    """
    generator = torch.Generator().manual_seed(seed)
    linears = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    gain = 0.0 if model.config.model_type.startswith("gemma") else 1.0  # Gemma's norms add 1
    with torch.no_grad():
        for parameter_name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            embeds = "emb" in parameter_name or ".wte" in parameter_name or ".wpe" in parameter_name
            if parameter_name in linears or parameter.ndim == 3:  # stacks of experts
                parameter.copy_(noise * (2.0 / model.config.hidden_size**0.5))
            elif parameter.ndim == 2:
                parameter.copy_(noise * 0.15)
            elif parameter_name.endswith("bias"):
                parameter.copy_(noise * 0.05)
            else:
                parameter.copy_((noise * 0.2 + gain) * (0.2 if embeds else 1.0))
    return model.eval()
