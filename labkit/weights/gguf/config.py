"""The config of the model in a GGUF file, as transformers describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from labkit.models.config_checks import check_fields
from labkit.models.config_file import REFUSALS, refused_fields
from labkit.system.errors import UserError
from labkit.weights.gguf.header import StoredTensor
from labkit.weights.gguf.metadata import Metadata

ROTARY = ("llama", "qwen2", "qwen3", "gemma2")
ARCHITECTURES = (*ROTARY, "gpt2", "bloom")
GEMMA2_WINDOW, GEMMA2_27B_LAYERS = 4096, 46  # as llama.cpp assumes
ROPE_FACTORS = "rope_freqs.weight"  # the divisor of each frequency
# llama.cpp computes with these, and transformers' models don't.
UNSUPPORTED = ("attention.scale", "attention.clamp_kqv", "logit_scale", "embedding_scale", "residual_scale")


def read_config(
    architecture: str, metadata: Metadata, tensors: Mapping[str, StoredTensor], specials: Mapping[str, int]
) -> PretrainedConfig:
    """The config of a model, from its metadata and the shapes of its tensors.

    specials: the ids of its special tokens, by transformers' names. Raises UserError for metadata that is of a wrong
    type, out of bounds, or not supported by transformers' model.
    """
    vocabulary = _vocabulary(architecture, metadata, tensors)
    read = {"gpt2": _gpt2, "bloom": _bloom, "gemma2": _gemma2}.get(architecture, _llama_like)
    fields = read(architecture, metadata)
    fields |= {
        "vocab_size": vocabulary,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **{name: number for name, number in specials.items() if number < vocabulary},
    }
    check_fields(fields, str(metadata.path))
    if architecture in ROTARY:
        fields["rope_parameters"] = _rope(architecture, metadata, fields, tensors.get(ROPE_FACTORS))
    try:
        return AutoConfig.for_model(architecture, **fields)
    except REFUSALS as error:
        reason = refused_fields(error, architecture, fields)
        raise UserError(f"{metadata.path}: {reason}; convert it again") from error


def _gpt2(architecture: str, metadata: Metadata) -> dict[str, Any]:
    return {
        "n_embd": metadata.needed_size("gpt2.embedding_length"),
        "n_layer": metadata.needed_size("gpt2.block_count"),
        "n_head": metadata.needed_size("gpt2.attention.head_count"),
        "n_inner": metadata.size("gpt2.feed_forward_length"),
        "n_positions": metadata.needed_size("gpt2.context_length"),
        "layer_norm_epsilon": _epsilon(metadata, "gpt2.attention.layer_norm_epsilon"),
    }


def _bloom(architecture: str, metadata: Metadata) -> dict[str, Any]:
    return {
        "hidden_size": metadata.needed_size("bloom.embedding_length"),
        "n_layer": metadata.needed_size("bloom.block_count"),
        "n_head": metadata.needed_size("bloom.attention.head_count"),
        "layer_norm_epsilon": _epsilon(metadata, "bloom.attention.layer_norm_epsilon"),
    }


def _llama_like(architecture: str, metadata: Metadata) -> dict[str, Any]:
    def size(key: str) -> int:
        return metadata.needed_size(f"{architecture}.{key}")

    present = [key for key in UNSUPPORTED if metadata.number(f"{architecture}.{key}")]
    present += ["expert_count"] if metadata.size(f"{architecture}.expert_count") else []
    present += ["attention.causal"] if metadata.flag(f"{architecture}.attention.causal") is False else []
    if present:
        raise UserError(f"{metadata.path} has {architecture}.{present[0]}, which is not supported")
    width, heads = size("embedding_length"), size("attention.head_count")
    check_fields({"hidden_size": width, "num_attention_heads": heads}, str(metadata.path))
    head_dim = metadata.size(f"{architecture}.attention.key_length") or width // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if (size_of_key := metadata.size(f"{architecture}.{key}") or head_dim) != head_dim:
            raise UserError(
                f"{metadata.path}: {architecture}.{key} is {size_of_key} with heads of {head_dim}; expected "
                f"{head_dim}: other sizes of values or of the rotary part are not supported"
            )
    kv_heads = metadata.size(f"{architecture}.attention.head_count_kv")
    return {
        "hidden_size": width,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": _epsilon(metadata, f"{architecture}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": size("context_length"),
    }


def _gemma2(architecture: str, metadata: Metadata) -> dict[str, Any]:
    """Sizes, windows and caps. llama.cpp knows the scale of queries by the number of layers."""
    fields = _llama_like(architecture, metadata)
    head_dim, width = fields["head_dim"], fields["hidden_size"] // fields["num_attention_heads"]
    caps = {
        f"{name}_logit_softcapping": metadata.number(f"gemma2.{name}_logit_softcapping") for name in ("attn", "final")
    }
    return fields | {
        "query_pre_attn_scalar": width if fields["num_hidden_layers"] == GEMMA2_27B_LAYERS else head_dim,
        "sliding_window": metadata.size("gemma2.attention.sliding_window") or GEMMA2_WINDOW,
        **{name: cap for name, cap in caps.items() if cap is not None},
    }


def _epsilon(metadata: Metadata, key: str) -> float:
    value = metadata.number(key)
    if value is None:
        raise UserError(f"{metadata.path} has no {key}; convert it again")
    return value


def _vocabulary(architecture: str, metadata: Metadata, tensors: Mapping[str, StoredTensor]) -> int:
    """The size of the vocabulary, by the rows of the embedding."""
    size, embedding = metadata.size(f"{architecture}.vocab_size"), tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"{metadata.path} has no tensor token_embd.weight; download or convert it again")
    rows = embedding.shape[0]
    if size not in (None, rows):
        raise UserError(
            f"{metadata.path}: token_embd.weight is of shape {list(embedding.shape)}, expected {size} rows as "
            f"{architecture}.vocab_size says; download or convert it again"
        )
    return rows


def _rope(
    architecture: str, metadata: Metadata, fields: Mapping[str, Any], factors: StoredTensor | None
) -> dict[str, Any]:
    """transformers' `rope_parameters` for the file's rotation."""
    prefix = f"{architecture}.rope.scaling."
    theta = metadata.number(f"{architecture}.rope.freq_base")
    plain = {"rope_type": "default", "rope_theta": 10_000.0 if theta is None else theta}
    kind = metadata.text(f"{prefix}type") or "linear"
    factor = metadata.number(f"{prefix}factor") or metadata.number(f"{architecture}.rope.scale_linear") or 1.0
    known = {"type", "factor", "finetuned", "original_context_length"}
    if kind == "yarn":
        rope = plain | {"rope_type": "yarn", "factor": factor} | _yarn(architecture, metadata)
        known |= {"yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"}
    elif kind in ("none", "linear"):
        rope = plain if kind == "none" or factor == 1 else plain | {"rope_type": "linear", "factor": factor}
    else:
        raise UserError(f"{metadata.path}: {prefix}type is {kind!r}; expected none, linear or yarn")
    if unknown := sorted(
        key for key in metadata.names() if key.startswith(prefix) and key.removeprefix(prefix) not in known
    ):
        raise UserError(f"{metadata.path}: {', '.join(unknown)} is not supported with {kind!r} scaling")
    check_fields({"rope_parameters": rope}, str(metadata.path))
    if factors is None:
        return rope
    if rope != plain:
        raise UserError(f"{metadata.path} has {ROPE_FACTORS} and {kind} scaling; expected one of them")
    return _divided(metadata, fields, rope, factors)


def _yarn(architecture: str, metadata: Metadata) -> dict[str, Any]:
    prefix = f"{architecture}.rope.scaling."
    if metadata.number(f"{prefix}yarn_ext_factor") not in (None, 1.0):
        raise UserError(f"{metadata.path}: {prefix}yarn_ext_factor is not supported; expected 1")
    original = metadata.size(f"{prefix}original_context_length")
    rope: dict[str, Any] = {
        "original_max_position_embeddings": original or metadata.needed_size(f"{architecture}.context_length")
    }
    names = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    for name, key in names.items():
        value = metadata.number(f"{prefix}{key}")
        if value is not None and value <= 0:
            raise UserError(f"{metadata.path}: {prefix}{key} is {value}, expected a number above 0")
        rope |= {} if value is None else {name: value}
    return rope


def _divided(
    metadata: Metadata, fields: Mapping[str, Any], plain: Mapping[str, Any], stored: StoredTensor
) -> dict[str, Any]:
    """`rope_parameters` for stored factors: Llama 3's scaling where it gives these factors, as it does in every
    published file. Otherwise transformers' longrope, with the factors themselves for both short and long texts.
    """
    pairs = fields["head_dim"] // 2
    if stored.kind.name != "F32" or stored.shape != (pairs,):
        raise UserError(
            f"{metadata.path}: {ROPE_FACTORS} is {stored.kind.name} {list(stored.shape)}, expected F32 [{pairs}]"
        )
    factors = stored.rows.astype(np.float32)
    if not np.isfinite(factors).all() or factors.min() <= 0:
        raise UserError(f"{metadata.path}: {ROPE_FACTORS} holds {factors.min()}, expected finite numbers above 0")
    llama3 = dict(plain) | {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    frequencies = plain["rope_theta"] ** -(torch.arange(0, 2 * pairs, 2, dtype=torch.float) / (2 * pairs))
    config = PretrainedConfig(rope_parameters=llama3, head_dim=fields["head_dim"], max_position_embeddings=1 << 20)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    long = fields["max_position_embeddings"] > llama3["original_max_position_embeddings"]
    if long and torch.allclose(frequencies / torch.from_numpy(factors), expected, rtol=1e-5, atol=0):
        return llama3
    return dict(plain) | {
        "rope_type": "longrope",
        "short_factor": factors.tolist(),
        "long_factor": factors.tolist(),
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": fields["max_position_embeddings"],
    }
