"""Published model shapes by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import (
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
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from labkit.models.tokenizer import END_OF_TEXT


@dataclass(frozen=True)
class Preset:
    """A shape by name. `hub_id`: where its trained weights are published; None: a shape of our own."""

    name: str
    hub_id: str | None
    make_config: Callable[[], PretrainedConfig]

    @property
    def hf_config(self) -> PretrainedConfig:
        """A fresh config of the shape, with the special tokens of the byte-level tokenizer."""
        return self.make_config()


SPECIAL: dict[str, Any] = {"bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT, "pad_token_id": END_OF_TEXT}


def _gpt2(layers: int, hidden: int, heads: int, **options: Any) -> Callable[[], PretrainedConfig]:
    return partial(GPT2Config, **SPECIAL, n_layer=layers, n_embd=hidden, n_head=heads, **options)


def _gptj(layers: int, hidden: int, heads: int, rotary: int, **options: Any) -> Callable[[], PretrainedConfig]:
    return partial(GPTJConfig, **SPECIAL, n_layer=layers, n_embd=hidden, n_head=heads, rotary_dim=rotary, **options)


def _neo(layers: int, hidden: int, heads: int) -> Callable[[], PretrainedConfig]:
    kinds = [[["global", "local"], layers // 2]]
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads}
    return partial(GPTNeoConfig, **SPECIAL, **sizes, attention_types=kinds, window_size=256)


def _sizes(layers: int, hidden: int, heads: int, inner: int, vocab: int, positions: int) -> dict[str, Any]:
    return SPECIAL | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
    }


def _neox(
    layers: int, hidden: int, heads: int, *, vocab: int = 50304, act: str = "gelu"
) -> Callable[[], PretrainedConfig]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
    sizes = _sizes(layers, hidden, heads, 4 * hidden, vocab, 2048)
    return lambda: GPTNeoXConfig(**sizes, hidden_act=act, rope_parameters=dict(rope))


def _bloom(layers: int, hidden: int, heads: int, vocab: int = 250880) -> Callable[[], PretrainedConfig]:
    return partial(BloomConfig, **SPECIAL, n_layer=layers, hidden_size=hidden, n_head=heads, vocab_size=vocab)


def _opt(layers: int, hidden: int, heads: int, **options: Any) -> Callable[[], PretrainedConfig]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "ffn_dim": 4 * hidden}
    return partial(OPTConfig, **SPECIAL, **sizes, **options)


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    inner: int,
    *,
    vocab: int = 32000,
    positions: int = 4096,
    rope: dict[str, Any] | None = None,
    family: Callable[..., PretrainedConfig] = LlamaConfig,
    theta: float = 10_000.0,
    **options: Any,
) -> Callable[[], PretrainedConfig]:
    sizes = _sizes(layers, hidden, heads, inner, vocab, positions) | {"num_key_value_heads": kv_heads} | options
    rope = {"rope_type": "default", "rope_theta": theta} | (rope or {})
    return lambda: family(**sizes, rope_parameters=dict(rope))


_llama2 = partial(_llama, rms_norm_eps=1e-5)
_llama3 = partial(_llama, rms_norm_eps=1e-5, vocab=128256, theta=500_000.0)
_llama3_rope = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_mistral = partial(_llama, family=MistralConfig, rms_norm_eps=1e-5, sliding_window=4096, positions=32768)
_qwen2 = partial(_llama, family=Qwen2Config, theta=1_000_000.0, positions=131072)
_qwen3 = partial(_llama, family=Qwen3Config, theta=1_000_000.0, positions=40960, head_dim=128, vocab=151936)
_gemma2 = partial(
    _llama, family=Gemma2Config, vocab=256000, positions=8192, head_dim=256, tie_word_embeddings=True, rms_norm_eps=1e-6
)
_qwen3_moe = partial(
    _llama,
    family=Qwen3MoeConfig,
    theta=1_000_000.0,
    positions=40960,
    head_dim=128,
    moe_intermediate_size=768,
    norm_topk_prob=True,
)
GRANITE_MOE: dict[str, Any] = {
    "num_local_experts": 32,
    "num_experts_per_tok": 8,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}
_gpt_oss = partial(
    _llama,
    hidden=2880,
    heads=64,
    kv_heads=8,
    inner=2880,
    family=GptOssConfig,
    vocab=201088,
    positions=131072,
    theta=150_000.0,
    rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    head_dim=64,
    num_experts_per_tok=4,
    sliding_window=128,
)
SMOLLM2 = _llama(30, 576, 9, 3, 1536, vocab=49152, positions=8192, theta=100_000.0, tie_word_embeddings=True)

PRESETS: dict[str, Preset] = {
    name: Preset(name, hub_id, config)
    for name, hub_id, config in (
        ("tiny-gpt2", None, _gpt2(2, 64, 4, vocab_size=512, n_positions=2048)),
        ("tiny-gptj", None, _gptj(2, 64, 4, 8, vocab_size=512)),
        ("tiny-bloom", None, _bloom(2, 64, 4, vocab=512)),
        ("tiny-llama", None, _llama(2, 64, 4, 2, 176, vocab=512, positions=2048)),
        (
            "tiny-moe",
            None,
            _qwen3_moe(
                *(2, 64, 4, 2, 176),
                vocab=512,
                positions=2048,
                head_dim=16,
                moe_intermediate_size=48,
                num_experts=8,
                num_experts_per_tok=2,
            ),
        ),
        ("gptj-shape", None, _gptj(12, 1024, 16, 64)),
        ("llama-shape", None, _llama(24, 1024, 16, 16, 2816, positions=2048)),
        (
            "moe-shape",
            None,
            _qwen3_moe(
                *(12, 768, 12, 4, 2304),
                vocab=32000,
                head_dim=64,
                moe_intermediate_size=384,
                num_experts=32,
                num_experts_per_tok=4,
            ),
        ),
        (
            "gpt-oss-shape",
            None,
            _gpt_oss(layers=12, hidden=768, heads=12, kv_heads=4, inner=384, vocab=32000, num_local_experts=32),
        ),
        (
            "qwen3-moe-shape",
            None,
            _qwen3_moe(12, 2048, 32, 4, 6144, vocab=32000, num_experts=32, num_experts_per_tok=4),
        ),
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", SMOLLM2),
        ("smollm2-shape", None, SMOLLM2),
        ("distilgpt2", "distilbert/distilgpt2", _gpt2(6, 768, 12)),
        ("gpt2", "openai-community/gpt2", _gpt2(12, 768, 12)),
        ("gpt2-medium", "openai-community/gpt2-medium", _gpt2(24, 1024, 16)),
        ("gpt2-large", "openai-community/gpt2-large", _gpt2(36, 1280, 20)),
        ("gpt2-xl", "openai-community/gpt2-xl", _gpt2(48, 1600, 25)),
        ("gpt-j-6b", "EleutherAI/gpt-j-6b", _gptj(28, 4096, 16, 64)),
        ("gpt-neo-125m", "EleutherAI/gpt-neo-125m", _neo(12, 768, 12)),
        ("gpt-neo-1.3b", "EleutherAI/gpt-neo-1.3B", _neo(24, 2048, 16)),
        ("gpt-neo-2.7b", "EleutherAI/gpt-neo-2.7B", _neo(32, 2560, 20)),
        ("gpt-neox-20b", "EleutherAI/gpt-neox-20b", _neox(44, 6144, 64, vocab=50432, act="gelu_fast")),
        ("pythia-70m", "EleutherAI/pythia-70m", _neox(6, 512, 8)),
        ("pythia-160m", "EleutherAI/pythia-160m", _neox(12, 768, 12)),
        ("pythia-410m", "EleutherAI/pythia-410m", _neox(24, 1024, 16)),
        ("pythia-1b", "EleutherAI/pythia-1b", _neox(16, 2048, 8)),
        ("pythia-1.4b", "EleutherAI/pythia-1.4b", _neox(24, 2048, 16)),
        ("pythia-2.8b", "EleutherAI/pythia-2.8b", _neox(32, 2560, 32)),
        ("pythia-6.9b", "EleutherAI/pythia-6.9b", _neox(32, 4096, 32, vocab=50432)),
        ("pythia-12b", "EleutherAI/pythia-12b", _neox(36, 5120, 40, vocab=50688)),
        ("bloom-560m", "bigscience/bloom-560m", _bloom(24, 1024, 16)),
        ("bloom-1b7", "bigscience/bloom-1b7", _bloom(24, 2048, 16)),
        ("bloom-3b", "bigscience/bloom-3b", _bloom(30, 2560, 32)),
        ("bloom-7b1", "bigscience/bloom-7b1", _bloom(30, 4096, 32)),
        ("bloom-176b", "bigscience/bloom", _bloom(70, 14336, 112)),
        ("opt-125m", "facebook/opt-125m", _opt(12, 768, 12)),
        ("opt-350m", "facebook/opt-350m", _opt(24, 1024, 16, do_layer_norm_before=False, word_embed_proj_dim=512)),
        ("opt-1.3b", "facebook/opt-1.3b", _opt(24, 2048, 32)),
        ("opt-2.7b", "facebook/opt-2.7b", _opt(32, 2560, 32)),
        ("opt-6.7b", "facebook/opt-6.7b", _opt(32, 4096, 32)),
        ("opt-13b", "facebook/opt-13b", _opt(40, 5120, 40)),
        ("opt-30b", "facebook/opt-30b", _opt(48, 7168, 56)),
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf", _llama2(32, 4096, 32, 32, 11008)),
        ("llama-2-13b", "meta-llama/Llama-2-13b-hf", _llama2(40, 5120, 40, 40, 13824)),
        ("llama-2-70b", "meta-llama/Llama-2-70b-hf", _llama2(80, 8192, 64, 8, 28672)),
        (
            "llama-3.2-1b",
            "meta-llama/Llama-3.2-1B",
            _llama3(16, 2048, 32, 8, 8192, positions=131072, rope=_llama3_rope, tie_word_embeddings=True),
        ),
        ("llama-3-8b", "meta-llama/Meta-Llama-3-8B", _llama3(32, 4096, 32, 8, 14336, positions=8192)),
        ("tinyllama-1.1b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", _llama2(22, 2048, 32, 4, 5632, positions=2048)),
        ("mistral-7b", "mistralai/Mistral-7B-v0.1", _mistral(32, 4096, 32, 8, 14336)),
        ("qwen2-0.5b", "Qwen/Qwen2-0.5B", _qwen2(24, 896, 14, 2, 4864, vocab=151936, tie_word_embeddings=True)),
        ("qwen2-1.5b", "Qwen/Qwen2-1.5B", _qwen2(28, 1536, 12, 2, 8960, vocab=151936, tie_word_embeddings=True)),
        ("qwen2-7b", "Qwen/Qwen2-7B", _qwen2(28, 3584, 28, 4, 18944, vocab=152064)),
        ("qwen3-0.6b", "Qwen/Qwen3-0.6B", _qwen3(28, 1024, 16, 8, 3072, tie_word_embeddings=True)),
        ("qwen3-1.7b", "Qwen/Qwen3-1.7B", _qwen3(28, 2048, 16, 8, 6144, tie_word_embeddings=True)),
        ("qwen3-4b", "Qwen/Qwen3-4B", _qwen3(36, 2560, 32, 8, 9728, tie_word_embeddings=True)),
        ("qwen3-8b", "Qwen/Qwen3-8B", _qwen3(36, 4096, 32, 8, 12288)),
        ("gemma-2-2b", "google/gemma-2-2b", _gemma2(26, 2304, 8, 4, 9216)),
        ("gemma-2-9b", "google/gemma-2-9b", _gemma2(42, 3584, 16, 8, 14336)),
        (
            "gemma-2-27b",
            "google/gemma-2-27b",
            _gemma2(46, 4608, 32, 16, 36864, head_dim=128, query_pre_attn_scalar=144),
        ),
        (
            "mixtral-8x7b",
            "mistralai/Mixtral-8x7B-v0.1",
            _llama(32, 4096, 32, 8, 14336, family=MixtralConfig, rms_norm_eps=1e-5, theta=1e6, positions=32768),
        ),
        (
            "granite-moe-1b",
            "ibm-granite/granite-3.1-1b-a400m-base",
            _llama(
                *(24, 1024, 16, 8, 512),
                family=GraniteMoeConfig,
                vocab=49155,
                theta=1_500_000.0,
                positions=131072,
                tie_word_embeddings=True,
                **GRANITE_MOE,
            ),
        ),
        (
            "olmoe-1b-7b",
            "allenai/OLMoE-1B-7B-0924",
            _llama(16, 2048, 16, 16, 1024, family=OlmoeConfig, vocab=50304, num_experts=64, num_experts_per_tok=8),
        ),
        (
            "qwen1.5-moe",
            "Qwen/Qwen1.5-MoE-A2.7B",
            _llama(24, 2048, 16, 16, 5632, family=Qwen2MoeConfig, vocab=151936, theta=1e6, positions=8192),
        ),
        (
            "qwen3-30b-a3b",
            "Qwen/Qwen3-30B-A3B",
            _qwen3_moe(48, 2048, 32, 4, 6144, vocab=151936, num_experts=128, num_experts_per_tok=8),
        ),
        ("gpt-oss-20b", "openai/gpt-oss-20b", _gpt_oss(layers=24, num_local_experts=32)),
        ("gpt-oss-120b", "openai/gpt-oss-120b", _gpt_oss(layers=36, num_local_experts=128)),
    )
}


def find_preset(name: str) -> Preset | None:
    """The preset of this name or hub id: `gptj-6B`, `GPT-J-6b` and `EleutherAI/gpt-j-6b` are the same."""
    owner, slash, model = name.rpartition("/")
    for preset in PRESETS.values():
        hub_owner, _, hub_name = (preset.hub_id or "").rpartition("/")
        if slash and owner.lower() != hub_owner.lower():
            continue
        if _key(model) and _key(model) in {_key(preset.name), _key(hub_name)}:
            return preset
    return None


def _key(name: str) -> str:
    """The name as it is compared: letters and digits in lower case, without "hf" at the end."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("hf")
