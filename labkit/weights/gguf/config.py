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
from labkit.weights.gguf.architectures import ARCHITECTURES
from labkit.weights.gguf.described import Described
from labkit.weights.gguf.header import StoredTensor
from labkit.weights.gguf.metadata import Metadata

ROPE_FACTORS = "rope_freqs.weight"  # the divisor of each frequency
LONG_ROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}  # the same


def read_config(
    architecture: str, metadata: Metadata, tensors: Mapping[str, StoredTensor], specials: Mapping[str, int]
) -> PretrainedConfig:
    """The config of a model, from its metadata and the shapes of its tensors.

    specials: the ids of its special tokens, by transformers' names. Raises UserError for metadata that is of a wrong
    type, out of bounds, or not supported by transformers' model.
    """
    vocabulary = _vocabulary(architecture, metadata, tensors)
    row = ARCHITECTURES[architecture]
    fields = row.read(Described(architecture, metadata, tensors))
    model_type = fields.pop("model_type", row.model_type)
    fields |= {
        "vocab_size": vocabulary,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **{name: number for name, number in specials.items() if number < vocabulary},
    }
    check_fields(fields, str(metadata.path))
    if row.rotary:
        rope = _rope(architecture, metadata, fields, tensors)
        if (part := fields.pop("partial_rotary_factor", None)) is not None:
            rope["partial_rotary_factor"] = part
        if (truncate := fields.pop("truncate", None)) is not None and rope["rope_type"] == "yarn":
            rope["truncate"] = truncate
        if (theta := fields.pop("local_theta", None)) is not None:
            rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}
        fields["rope_parameters"] = rope
    try:
        return AutoConfig.for_model(model_type, **fields)
    except REFUSALS as error:
        reason = refused_fields(error, model_type, fields)
        raise UserError(f"{metadata.path}: {reason}; convert it again") from error


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
    architecture: str, metadata: Metadata, fields: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """transformers' `rope_parameters` for the file's rotation."""
    factors = {name: tensors[name] for name in (ROPE_FACTORS, *LONG_ROPE.values()) if name in tensors}
    prefix = f"{architecture}.rope.scaling."
    theta = metadata.number(f"{architecture}.rope.freq_base")
    plain = {"rope_type": "default", "rope_theta": 10_000.0 if theta is None else theta}
    kind = metadata.text(f"{prefix}type") or ("longrope" if factors.keys() - {ROPE_FACTORS} else "linear")
    factor = metadata.number(f"{prefix}factor") or metadata.number(f"{architecture}.rope.scale_linear") or 1.0
    known = {"type", "factor", "finetuned", "original_context_length"}
    if kind == "yarn":
        rope = plain | {"rope_type": "yarn", "factor": factor} | _yarn(architecture, metadata)
        known |= {"yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"}
    elif kind == "longrope" and factors.keys() >= {*LONG_ROPE.values()}:
        rope = plain | _long_rope(architecture, metadata, fields, factors)
        known |= {"attn_factor"}
    elif kind in ("none", "linear"):
        rope = plain if kind == "none" or factor == 1 else plain | {"rope_type": "linear", "factor": factor}
    else:
        raise UserError(
            f"{metadata.path}: {prefix}type is {kind!r}; expected none, linear or yarn, or longrope with the tensors "
            f"{' and '.join(LONG_ROPE.values())}"
        )
    if unknown := sorted(
        key for key in metadata.names() if key.startswith(prefix) and key.removeprefix(prefix) not in known
    ):
        raise UserError(f"{metadata.path}: {', '.join(unknown)} is not supported with {kind!r} scaling")
    check_fields({"rope_parameters": rope}, str(metadata.path))
    if ROPE_FACTORS not in factors:
        return rope
    if rope != plain:
        raise UserError(f"{metadata.path} has {ROPE_FACTORS} and {kind} scaling; expected one of them")
    return _divided(metadata, fields, rope, factors[ROPE_FACTORS])


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


def _long_rope(
    architecture: str, metadata: Metadata, fields: Mapping[str, Any], factors: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """What `rope_parameters` has for Phi-3's and Phi-4-mini's rotation, which has other factors in long texts."""
    prefix = f"{architecture}.rope.scaling."
    attention = metadata.number(f"{prefix}attn_factor")
    if attention is not None and attention <= 0:
        raise UserError(f"{metadata.path}: {prefix}attn_factor is {attention}, expected a number above 0")
    return {
        "rope_type": "longrope",
        **{field: _stored_factors(metadata, fields, factors[name]).tolist() for field, name in LONG_ROPE.items()},
        "attention_factor": 1.0 if attention is None else attention,
        "original_max_position_embeddings": metadata.needed_size(f"{prefix}original_context_length"),
    }


def _stored_factors(metadata: Metadata, fields: Mapping[str, Any], stored: StoredTensor) -> np.ndarray:
    """The divisors of all frequencies in a tensor. Raises UserError unless they are positive, and one for each pair."""
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    pairs = int(head_dim * fields.get("partial_rotary_factor", 1)) // 2
    if stored.kind.name != "F32" or stored.shape != (pairs,):
        raise UserError(
            f"{metadata.path}: {stored.name} is {stored.kind.name} {list(stored.shape)}, expected F32 [{pairs}]"
        )
    factors = stored.rows.astype(np.float32)
    if not np.isfinite(factors).all() or factors.min() <= 0:
        raise UserError(f"{metadata.path}: {stored.name} holds {factors.min()}, expected finite numbers above 0")
    return factors


def _divided(
    metadata: Metadata, fields: Mapping[str, Any], plain: Mapping[str, Any], stored: StoredTensor
) -> dict[str, Any]:
    """`rope_parameters` for stored factors: Llama 3's scaling where it gives these factors, as it does in every
    published file. Otherwise transformers' longrope, with the factors themselves for both short and long texts.
    """
    factors = _stored_factors(metadata, fields, stored)
    pairs = len(factors)
    llama3 = dict(plain) | {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    frequencies = plain["rope_theta"] ** -(torch.arange(0, 2 * pairs, 2, dtype=torch.float) / (2 * pairs))
    config = PretrainedConfig(rope_parameters=llama3, head_dim=2 * pairs, max_position_embeddings=1 << 20)
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
