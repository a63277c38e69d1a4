"""Small random models of the architectures that are sliced. Ranks cannot share their heads and widths evenly."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    MixtralConfig,
    MixtralForCausalLM,
    MptConfig,
    MptForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 99
TOKENS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
WIDE: dict[str, Any] = {
    **TOKENS,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
}
GROUPED: dict[str, Any] = WIDE | {"num_key_value_heads": 3, "head_dim": 10}
BLOCKS: dict[str, Any] = {**TOKENS, "hidden_size": 40, "num_hidden_layers": 2}

t5_config = partial(
    T5Config, **TOKENS | {"decoder_start_token_id": 1}, d_model=40, d_kv=8, d_ff=52, num_layers=2, num_heads=5
)
falcon_config = partial(FalconConfig, **BLOCKS | {"hidden_size": 48}, num_attention_heads=6)

MODELS: dict[str, Callable[[], tuple[type[PreTrainedModel], Any]]] = {
    "t5": lambda: (T5ForConditionalGeneration, t5_config()),
    "t5-gated": lambda: (T5ForConditionalGeneration, t5_config(feed_forward_proj="gated-gelu", num_heads=4)),
    "marian": lambda: (MarianMTModel, marian_config()),
    "bert": lambda: (BertForMaskedLM, BertConfig(**WIDE)),
    "roberta": lambda: (RobertaForMaskedLM, RobertaConfig(**WIDE)),
    "distilbert": lambda: (
        DistilBertForMaskedLM,
        DistilBertConfig(vocab_size=VOCAB, dim=40, hidden_dim=56, n_layers=2, n_heads=5, max_position_embeddings=64),
    ),
    "falcon-new": lambda: (FalconForCausalLM, falcon_config(new_decoder_architecture=True, num_kv_heads=2)),
    "falcon-mqa": lambda: (FalconForCausalLM, falcon_config(bias=True)),
    "falcon-alibi": lambda: (FalconForCausalLM, falcon_config(multi_query=False, parallel_attn=False, alibi=True)),
    "gemma": lambda: (GemmaForCausalLM, GemmaConfig(**GROUPED | {"num_key_value_heads": 1})),
    "gemma2": lambda: (Gemma2ForCausalLM, Gemma2Config(**GROUPED, sliding_window=5)),
    "gemma3": lambda: (Gemma3ForCausalLM, Gemma3TextConfig(**GROUPED, sliding_window=5)),
    "mixtral": lambda: (MixtralForCausalLM, MixtralConfig(**GROUPED, num_local_experts=4)),
    "llama": lambda: (LlamaForCausalLM, LlamaConfig(**GROUPED)),
    "phi3": lambda: (Phi3ForCausalLM, Phi3Config(**GROUPED | {"head_dim": 8})),
    "gpt2": lambda: (GPT2LMHeadModel, GPT2Config(**TOKENS, n_embd=40, n_head=5, n_layer=2, n_positions=64)),
    "opt": lambda: (
        OPTForCausalLM,
        OPTConfig(**BLOCKS, num_attention_heads=5, ffn_dim=52, word_embed_proj_dim=40, max_position_embeddings=64),
    ),
    "bloom": lambda: (BloomForCausalLM, BloomConfig(**TOKENS, hidden_size=40, n_head=5, n_layer=2)),
    "mpt": lambda: (MptForCausalLM, MptConfig(vocab_size=VOCAB, d_model=40, n_heads=5, n_layers=2, max_seq_len=64)),
    "gpt-oss": lambda: (GptOssForCausalLM, GptOssConfig(**GROUPED, num_local_experts=4, sliding_window=5)),
    "deepseek": lambda: (DeepseekV3ForCausalLM, deepseek_config()),
}
ENCODERS = ("bert", "roberta", "distilbert")
ENCODER_DECODERS = ("t5", "t5-gated", "marian")


def marian_config() -> MarianConfig:
    return MarianConfig(
        **TOKENS | {"decoder_start_token_id": 1},
        d_model=40,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=5,
        decoder_attention_heads=4,
        encoder_ffn_dim=52,
        decoder_ffn_dim=44,
        max_position_embeddings=64,
        forced_eos_token_id=None,
    )


def deepseek_config() -> DeepseekV3Config:
    return DeepseekV3Config(
        **WIDE,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    )


def seeded(name: str, seed: int = 0) -> PreTrainedModel:
    """Model in float32 without trivial biases and norm weights, whose greedy tokens vary."""
    torch.manual_seed(seed)
    model_class, config = MODELS[name]()
    model = model_class(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if parameter.ndim == 1:
                parameter += noise / 4
            else:  # small embeddings let the layers decide the next token, even with a tied head
                embeds = any(word in path for word in ("emb", "wte", "wpe", "shared.weight"))
                parameter.copy_(noise * (0.1 if embeds else 2 / parameter.shape[-1] ** 0.5))
    return model


def padded_batch(name: str) -> dict[str, Tensor]:
    """Three rows of unequal lengths."""
    tokens = torch.randint(5, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :4] = mask[2, :1] = 0
    if name in ENCODERS + ENCODER_DECODERS:
        mask = mask.flip(1)
    return {"input_ids": tokens * mask, "attention_mask": mask}


def logits(name: str, model: nn.Module) -> Tensor:
    """Logits of a forward over the padded batch, without the padding."""
    batch = padded_batch(name)
    visible = batch["attention_mask"].bool()
    if name in ENCODER_DECODERS:
        batch |= {"decoder_input_ids": batch["input_ids"][:, :6]}
        visible = torch.ones_like(batch["decoder_input_ids"]).bool()
    with torch.no_grad():
        visible_logits: Tensor = model(**batch).logits[visible]
    return visible_logits


def tokens(name: str, model: Any, **options: Any) -> Tensor:
    """Result of greedy generate on the padded batch. No token may repeat, since random models like to repeat one."""
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "no_repeat_ngram_size": 1} | options
    generated: Tensor = model.generate(**padded_batch(name), **settings)
    return generated
