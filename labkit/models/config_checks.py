"""The fields of a Hugging Face config that labkit computes with: their types, and the bounds of their sizes.

A config is data that somebody else wrote. Its fields are checked before they are used, because transformers builds
lists as long as a config says, and Python divides by its numbers. The bounds are generous: each is several times the
largest value of any published model of these families.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from labkit.system.errors import UserError
from labkit.system.shown import shown_value

MOST_LAYERS = 1 << 12
MOST_HEADS = 1 << 12
MOST_HEAD_DIM = 1 << 14
MOST_WIDTH = 1 << 20  # of hidden states, embeddings and the MLP
MOST_EXPERTS = 1 << 14
MOST_VOCABULARY = 1 << 22
MOST_POSITIONS = 1 << 28
MOST_LABELS = 1 << 20  # transformers makes a dict of their names

FieldCheck = Callable[[Any], str | None]  # a value -> None if it is right, else the description of a right value


def _size(most: int, *, least: int = 1, optional: bool = False) -> FieldCheck:
    expected = f"an integer from {least} to {most}" + (" or null" if optional else "")

    def check(value: Any) -> str | None:
        if value is None and optional:
            return None
        return None if type(value) is int and least <= value <= most else expected

    return check


def _number(*, above: float | None = None, most: float = math.inf, optional: bool = False) -> FieldCheck:
    """A finite number, at least zero or larger than `above`."""
    expected = "a number of at least 0" if above is None else f"a number above {above:g}"
    expected += ("" if most == math.inf else f" and at most {most:g}") + (" or null" if optional else "")

    def check(value: Any) -> str | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return expected
        large_enough = value >= 0 if above is None else value > above
        return None if large_enough and value <= most else expected

    return check


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else "a string"


def _texts(value: Any) -> str | None:
    right = value is None or (isinstance(value, list | tuple) and all(isinstance(item, str) for item in value))
    return None if right else "a list of strings"


def _names(value: Any) -> str | None:
    return None if value is None or isinstance(value, dict) else "an object or null"


def _attention_types(value: Any) -> str | None:
    """GPT-Neo's pairs of (kinds of attention, how often they repeat), which transformers expands into a list."""
    expected = f"a list of pairs of a list of strings and an integer from 1 to {MOST_LAYERS}"
    if not isinstance(value, list | tuple):
        return expected
    for pair in value:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not pair[0] or _texts(pair[0]):
            return expected
        if _size(MOST_LAYERS)(pair[1]):
            return expected
    return None


def _float_type(value: Any) -> str | None:
    names = ("float32", "bfloat16", "float16", "float64")
    right = value is None or (value if isinstance(value, str) else str(value).removeprefix("torch.")) in names
    return None if right else f"one of {', '.join(names)} or null: the type that the weights are stored in"


ROPE: dict[str, FieldCheck] = {
    "rope_type": _text,
    "rope_theta": _number(above=0, most=1e30),
    "factor": _number(above=0, most=1e9),
    "partial_rotary_factor": _number(above=0, most=1),
    "low_freq_factor": _number(above=0, most=1e9),
    "high_freq_factor": _number(above=0, most=1e9),
    "original_max_position_embeddings": _size(MOST_POSITIONS),
}


def _rope(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        return "an object or null"
    for name, check in ROPE.items():
        if name in value and (expected := check(value[name])):
            return f"{name} to be {expected}"
    return None


LAYERS, HEADS, WIDTH = _size(MOST_LAYERS), _size(MOST_HEADS), _size(MOST_WIDTH)
OPTIONAL_WIDTH = _size(MOST_WIDTH, optional=True)
WINDOW = _size(MOST_POSITIONS, least=0, optional=True)  # 0 in a model without windows (Qwen2-MoE)

DROPOUTS = (  # unused in inference, but PyTorch refuses to build or to call a model with another probability
    *("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout", "embd_pdrop", "embed_dropout"),
    *("hidden_dropout", "hidden_dropout_prob", "layerdrop", "resid_dropout", "resid_pdrop", "summary_first_dropout"),
    *("classifier_dropout", "qa_dropout", "seq_classif_dropout"),
)

MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")

FIELDS: dict[str, FieldCheck] = (  # every spelling of the families that labkit reads
    dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), LAYERS)
    | dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), HEADS)
    | {"num_key_value_heads": _size(MOST_HEADS, optional=True)}
    | dict.fromkeys(("hidden_size", "n_embd", "dim", "ffn_dim", "hidden_dim"), WIDTH)
    | dict.fromkeys(("intermediate_size", "n_inner", "word_embed_proj_dim"), OPTIONAL_WIDTH)
    | {"head_dim": _size(MOST_HEAD_DIM, optional=True), "rotary_dim": _size(MOST_HEAD_DIM)}
    | dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), _size(MOST_EXPERTS))
    | dict.fromkeys(("n_routed_experts", "moe_num_experts", "moe_k"), _size(MOST_EXPERTS, optional=True))
    | dict.fromkeys(SHARED_EXPERTS, _size(MOST_EXPERTS, least=0, optional=True))
    | {"shared_intermediate_size": _size(MOST_WIDTH, least=0)}
    | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), WIDTH)
    | dict.fromkeys(MULTIPLIERS, _number(above=0, most=1e30))
    | {"id2label": _names, "label2id": _names}
    | {"vocab_size": _size(MOST_VOCABULARY), "num_labels": _size(MOST_LABELS, least=0)}
    | dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), _size(MOST_POSITIONS))
    | dict.fromkeys(DROPOUTS, _number(most=1, optional=True))
    | {"sliding_window": WINDOW, "window_size": WINDOW}
    | {"max_window_layers": _size(MOST_LAYERS, least=0, optional=True)}
    | dict.fromkeys(("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps"), _number())
    | dict.fromkeys(("initializer_range", "init_std"), _number())
    | dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _number(above=0, most=1e30, optional=True))
    | {"query_pre_attn_scalar": _number(above=0, most=1e30)}
    | dict.fromkeys(("activation_function", "hidden_act", "hidden_activation", "activation", "model_type"), _text)
    | dict.fromkeys(("architectures", "layer_types", "attention_layers"), _texts)
    | dict.fromkeys(("rope_parameters", "rope_scaling"), _rope)
    | dict.fromkeys(("dtype", "torch_dtype"), _float_type)
    | {"rope_theta": ROPE["rope_theta"], "attention_types": _attention_types}
    | dict.fromkeys(
        (
            "add_cross_attention",
            "apply_residual_connection_post_layernorm",
            "attention_bias",
            "do_layer_norm_before",
            "enable_bias",
            "is_decoder",
            "layer_norm_elementwise_affine",
            "mlp_bias",
            "norm_topk_prob",
            "output_router_logits",
            "qkv_bias",
            "scale_attn_by_inverse_layer_idx",
            "scale_attn_weights",
            "tie_word_embeddings",
            "use_parallel_residual",
            "use_sliding_window",
            "_remove_final_layer_norm",
        ),
        _flag,
    )
)


def check_fields(values: Mapping[str, Any], where: str) -> None:
    """Raises UserError for the first value of a wrong type or out of its field's bounds.

    `where`: the origin of the values, for the error message. Missing and unknown fields are not checked.
    """
    for name, value in values.items():
        check = FIELDS.get(name)
        if check is not None and (expected := check(value)):
            raise UserError(f"{where}: {name} = {shown_value(value)}; expected {expected}")
