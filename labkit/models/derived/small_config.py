"""A small config of the same class as a large one, with the same switches: a model of it has every kind of layer that
the large one has, and is cheap enough to be run beside transformers' own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig

from labkit.models.derived.rotations import LONG_FROM, LONG_ROPE
from labkit.system.errors import UserError

HEADS, KV_HEADS, HEAD_DIM, EXPERTS, CHOSEN = 4, 2, 24, 4, 2  # the root of 96 is no number that a config has
HIDDEN, INNER, VOCAB = HEADS * HEAD_DIM, 112, 128
MOST_LAYERS = 4
SHORT_POSITIONS = 43  # of a long rope: texts of a proof are shorter and longer, and one grows beyond it
MOST = 1 << 22  # of any other whole number in a config: a class may make as many modules

EXPERTS_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts")
# Sizes by their names in transformers' configs. Names that are missing from a config, or None there, stay so.
SIZES: dict[str, int] = (
    dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim", "d_embed"), HIDDEN
    )
    | dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "inner_dim", "hidden_dim"), INNER
    )
    | dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "mlp_dim", "ffn_intermediate_size"), INNER)
    | dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), HEADS)
    | dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), HEADS)
    | {
        "num_key_value_heads": KV_HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "rotary_dim": 8,
    }
    | dict.fromkeys(EXPERT_COUNTS, EXPERTS)
    | dict.fromkeys(EXPERTS_CHOSEN, CHOSEN)
    | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32)
    | {"n_group": 2, "topk_group": 1, "num_expert_group": 2}  # so that a choice among groups shows
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    | dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 256)
    | {"sliding_window": 8, "attention_window": 8, "window_size": 8}
    | {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16, "n_words": VOCAB, "emb_dim": HIDDEN}
    | {"attention_hidden_size": HIDDEN, "embedding_dim": HIDDEN, "d_head": HEAD_DIM, "d_inner": INNER}
    | {"mamba_n_heads": 8, "mamba_d_head": HEAD_DIM, "attn_layer_period": 2, "attn_layer_offset": 1}
)
ROPES = ("rope_parameters", "rope_scaling")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers")


def small_config(config: PretrainedConfig, *, every_layer: bool = False) -> PretrainedConfig:
    """A config of the same class with small sizes. All other fields stay. Configs within it become small, too.

    A list with an entry per layer keeps the first layers that differ from each other. Without such a list there are
    four layers. every_layer: all layers stay, for code that treats some of them in another way by their number.
    Raises UserError for a number that is out of bounds, and any error of a class that does not take these sizes.
    """
    fields = {name: copy.deepcopy(value) for name, value in vars(config).items() if not name.startswith("_")}
    for name, value in fields.items():
        if isinstance(value, PretrainedConfig):
            fields[name] = small_config(value, every_layer=every_layer)
    fields |= _small_sizes(fields)
    fields |= {name: _small_rope(value) for name, value in fields.items() if name in ROPES and isinstance(value, dict)}
    if large := [name for name, value in fields.items() if isinstance(value, int) and value > MOST]:
        raise UserError(f"{large[0]} = {fields[large[0]]} of this {type(config).__name__}; expected at most {MOST}")
    if not every_layer:
        fields |= _fewer_layers(fields)
    for name in ("transformers_version", "architectures", "model_type", "ignore_keys_at_rope_validation"):
        fields.pop(name, None)
    return type(config)(**fields)


def _small_sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {name: min(size, fields[name]) for name, size in SIZES.items() if _is_size(fields.get(name))}
    if "head_dim" in fields:  # with a latent for keys and values, head_dim is the size of the rotated part
        sizes["head_dim"] = sizes.get("qk_rope_head_dim", HEAD_DIM)
    for name in ("num_key_value_heads", "num_kv_heads"):
        if name in fields and fields[name] in (None, fields.get("num_attention_heads")):
            sizes[name] = HEADS
    if _is_size(fields.get("expand")) and "num_heads" in sizes:  # Mamba 2
        sizes["num_heads"] = HIDDEN * fields["expand"] // HEAD_DIM
    if LONG_FROM in fields:
        sizes[LONG_FROM] = SHORT_POSITIONS
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if fields.get(name) is not None:
            sizes[name] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}[name]
    return sizes


def _small_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a rotation, or of one for each kind of layer, with as many factors as a small head has pairs. A
    long rope's factors come from its whole list, since the first ones may be alike for short and long texts.
    """
    pairs = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    small = {
        name: _small_rope(value) if isinstance(value, dict) else value[:pairs] if isinstance(value, list) else value
        for name, value in rope.items()
    }
    if rope.get("rope_type") == LONG_ROPE:
        factors = {name: rope[name] for name in ("short_factor", "long_factor")}
        small |= {name: [every[len(every) * pair // pairs] for pair in range(pairs)] for name, every in factors.items()}
        small[LONG_FROM] = SHORT_POSITIONS
    return small


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _fewer_layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The number of layers, and every list with an entry per layer, for the first layers of each kind."""
    count = next((fields[name] for name in LAYERS if _is_size(fields.get(name))), None)
    if count is None:
        return {}
    lists = {
        name: value for name, value in fields.items() if isinstance(value, list | tuple) and len(value) == count > 1
    }
    chosen = _first_of_each_kind(count, list(lists.values()))
    fewer: dict[str, Any] = {name: type(value)(value[index] for index in chosen) for name, value in lists.items()}
    return fewer | {name: len(chosen) for name in LAYERS if _is_size(fields.get(name))}


def _first_of_each_kind(count: int, lists: Sequence[Sequence[Any]]) -> list[int]:
    kinds: dict[str, int] = {}
    for index in range(count):
        kinds.setdefault(repr([entries[index] for entries in lists]), index)
    chosen = sorted(kinds.values())[:MOST_LAYERS]
    return chosen if len(chosen) > 1 else list(range(min(count, MOST_LAYERS)))
