"""Reads a Hugging Face config into the fields of `ModelConfig`: one reader per family.

A switch that the engine does not compute exactly raises UserError with its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from labkit.models.config import RotarySpec
from labkit.system.errors import UserError
from labkit.system.shown import shown_value

Fields = dict[str, Any]

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
}
CONSTANT_ROPES = ("default", "linear", "llama3", "yarn")  # frequencies do not depend on the length of the text
ALL_LINEARS = frozenset({"qkv", "attn_out", "ff1", "ff2"})


def _fields(
    hf: PretrainedConfig,
    *,
    activation: str,
    intermediate_size: int,
    head_dim: int | None = None,
    scales: tuple[float, ...] | None = None,
    windows: Iterable[int | None] | None = None,
    **fields: Any,
) -> Fields:
    """The fields that all architectures spell alike or that follow from such fields; `fields` add to them or replace
    them.
    """
    _require(hf, quantization_config=None)
    heads, layers = hf.num_attention_heads, hf.num_hidden_layers
    head_dim = head_dim or _head_dim(hf)
    if activation not in ACTIVATIONS:
        raise UserError(
            f"activation {shown_value(activation)} is not supported; expected one of {', '.join(ACTIVATIONS)}"
        )
    known = {
        "hidden_size": hf.hidden_size,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "vocab_size": hf.vocab_size,
        "embedding_size": hf.hidden_size,
        "activation": ACTIVATIONS[activation],
        "gated": False,
        "attention_scales": scales or (head_dim**-0.5,) * layers,
        "windows": (None,) * layers if windows is None else tuple(windows),
        "tied_head": bool(hf.tie_word_embeddings),
    }
    return known | fields


def _head_dim(hf: PretrainedConfig) -> int:
    heads = hf.num_attention_heads
    head_dim, rest = divmod(hf.hidden_size, heads)
    if rest:
        raise UserError(f"hidden size {hf.hidden_size} cannot be split over {heads} heads; use a multiple of {heads}")
    return int(head_dim)


def read_gpt2(hf: PretrainedConfig) -> Fields:
    _require(hf, add_cross_attention=False)
    scale = _head_dim(hf) ** -0.5 if hf.scale_attn_weights else 1.0
    by_layer = hf.scale_attn_by_inverse_layer_idx
    return _fields(
        hf,
        activation=hf.activation_function,
        intermediate_size=hf.n_inner or 4 * hf.hidden_size,
        max_positions=hf.max_position_embeddings,
        position="learned",
        norm="layer",
        norm_eps=hf.layer_norm_epsilon,
        biases=ALL_LINEARS,
        scales=tuple(scale / (i + 1) if by_layer else scale for i in range(hf.num_hidden_layers)),
    )


def read_gptj(hf: PretrainedConfig) -> Fields:
    if hf.rotary_dim > _head_dim(hf) or hf.rotary_dim % 2:
        raise UserError(f"rotary_dim = {hf.rotary_dim} is not supported; expected an even number that fits in a head")
    exponents = torch.arange(0, hf.rotary_dim, 2, dtype=torch.int64) / hf.rotary_dim
    return _fields(
        hf,
        activation=hf.activation_function,
        intermediate_size=hf.n_inner or 4 * hf.hidden_size,
        max_positions=hf.max_position_embeddings,
        position="rotary",
        rotary=RotarySpec(hf.rotary_dim, interleaved=True, inv_freq=tuple((1.0 / 10000**exponents).tolist())),
        norm="layer",
        norm_eps=hf.layer_norm_epsilon,
        biases=frozenset({"ff1", "ff2", "head"}),
        parallel_residual=True,
        shared_norm=True,
    )


def read_gpt_neo(hf: PretrainedConfig) -> Fields:
    kinds = {"global": None, "local": hf.window_size}
    if unknown := set(hf.attention_layers or ()) - set(kinds):
        raise UserError(
            f"attention_layers names {shown_value(sorted(unknown))}; expected only {shown_value(sorted(kinds))}"
        )
    return _fields(
        hf,
        activation=hf.activation_function,
        intermediate_size=hf.intermediate_size or 4 * hf.hidden_size,
        max_positions=hf.max_position_embeddings,
        position="learned",
        norm="layer",
        norm_eps=hf.layer_norm_epsilon,
        biases=frozenset({"attn_out", "ff1", "ff2"}),
        scales=(1.0,) * hf.num_hidden_layers,
        windows=[kinds[kind] for kind in hf.attention_layers or ()],
    )


def read_gpt_neox(hf: PretrainedConfig) -> Fields:
    return _fields(
        hf,
        activation=hf.hidden_act,
        intermediate_size=hf.intermediate_size,
        max_positions=hf.max_position_embeddings,
        position="rotary",
        rotary=_rotary(hf, _head_dim(hf), partial=True),
        norm="layer",
        norm_eps=hf.layer_norm_eps,
        biases=ALL_LINEARS if hf.attention_bias else frozenset({"ff1", "ff2"}),
        parallel_residual=hf.use_parallel_residual,
    )


def read_bloom(hf: PretrainedConfig) -> Fields:
    return _fields(
        hf,
        activation="gelu_new",
        intermediate_size=4 * hf.hidden_size,
        max_positions=None,
        position="alibi",
        norm="layer",
        norm_eps=hf.layer_norm_epsilon,
        biases=ALL_LINEARS,
        embedding_norm=True,
        residual_from_norm=hf.apply_residual_connection_post_layernorm,
    )


def read_opt(hf: PretrainedConfig) -> Fields:
    _require(hf, layer_norm_elementwise_affine=True)
    return _fields(
        hf,
        activation=hf.activation_function,
        intermediate_size=hf.ffn_dim,
        max_positions=hf.max_position_embeddings,
        position="learned",
        position_offset=2,
        norm="layer",
        norm_eps=1e-5,
        biases=ALL_LINEARS if hf.enable_bias else frozenset(),
        pre_norm=hf.do_layer_norm_before,
        final_norm=hf.do_layer_norm_before and not hf._remove_final_layer_norm,
        embedding_size=hf.word_embed_proj_dim,
    )


def llama_like(hf: PretrainedConfig, **fields: Any) -> Fields:
    head_dim = getattr(hf, "head_dim", None) or _head_dim(hf)
    common = {
        "activation": getattr(hf, "hidden_act", None),
        "num_kv_heads": hf.num_key_value_heads or hf.num_attention_heads,
        "max_positions": hf.max_position_embeddings,
        "position": "rotary",
        "rotary": _rotary(hf, head_dim),
        "norm": "rms",
        "norm_eps": hf.rms_norm_eps,
        "gated": True,
        "intermediate_size": hf.intermediate_size,
    }
    return _fields(hf, head_dim=head_dim, **(common | fields))


def read_llama(hf: PretrainedConfig) -> Fields:
    attention = {"qkv", "attn_out"} if hf.attention_bias else set()
    return llama_like(hf, biases=frozenset(attention | ({"ff1", "ff2"} if hf.mlp_bias else set())))


def read_mistral(hf: PretrainedConfig) -> Fields:
    return llama_like(hf, windows=(hf.sliding_window,) * hf.num_hidden_layers)


def read_qwen2(hf: PretrainedConfig) -> Fields:
    return llama_like(hf, biases=frozenset({"qkv"}), windows=layer_windows(hf))


def read_qwen3(hf: PretrainedConfig) -> Fields:
    biases = frozenset({"qkv", "attn_out"} if hf.attention_bias else ())
    return llama_like(hf, biases=biases, windows=layer_windows(hf), qk_norm=True)


def read_gemma2(hf: PretrainedConfig) -> Fields:
    """Gemma 2. Its attention is scaled by a number of its own, and capped; so are its logits."""
    _require(hf, use_bidirectional_attention=False)
    return llama_like(
        hf,
        activation=hf.hidden_activation,
        scales=(hf.query_pre_attn_scalar**-0.5,) * hf.num_hidden_layers,
        windows=layer_windows(hf),
        biases=frozenset({"qkv", "attn_out"} if hf.attention_bias else ()),
        output_norms=True,
        norm_offset=1.0,
        embedding_scale=hf.hidden_size**0.5,
        attention_cap=hf.attn_logit_softcapping,
        logit_cap=hf.final_logit_softcapping,
    )


def read_bert(hf: PretrainedConfig) -> Fields:
    """A BERT or a RoBERTa."""
    return _encoder(hf, activation=hf.hidden_act, intermediate_size=hf.intermediate_size, norm_eps=hf.layer_norm_eps)


def read_distilbert(hf: PretrainedConfig) -> Fields:
    return _encoder(hf, activation=hf.activation, intermediate_size=hf.hidden_dim, norm_eps=1e-12)


def _encoder(hf: PretrainedConfig, **fields: Any) -> Fields:
    """The layers of an encoder. transformers embeds the input, so it already has positions and a norm. Within a layer
    each norm follows the sum with the residual.
    """
    _require(hf, is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
    common = {
        "max_positions": hf.max_position_embeddings,
        "position": "learned",
        "norm": "layer",
        "biases": ALL_LINEARS,
        "pre_norm": False,
        "final_norm": False,
        "causal": False,
        "tied_head": False,
    }
    return _fields(hf, **(common | fields))


def layer_windows(hf: PretrainedConfig) -> tuple[int | None, ...]:
    kinds, named = {"full_attention": None, "sliding_attention": hf.sliding_window}, hf.layer_types or ()
    if unknown := set(named) - set(kinds):
        raise UserError(f"layer_types names {shown_value(sorted(unknown))}; expected only {shown_value(sorted(kinds))}")
    if "sliding_attention" in named and not hf.sliding_window:
        raise UserError(
            f"layer_types names sliding_attention and sliding_window is {shown_value(hf.sliding_window)}; expected the "
            "window's number of tokens"
        )
    return tuple(kinds[kind] for kind in named)


def _rotary(hf: PretrainedConfig, head_dim: int, *, partial: bool = False) -> RotarySpec:
    """The rotation that `rope_parameters` describes. Raises UserError for frequencies that depend on the length of the
    text.

    partial: the model may rotate only a part of each head.
    """
    rope = hf.rope_parameters or {}
    kind = rope.get("rope_type")
    constant = kind in CONSTANT_ROPES
    constant |= kind == "longrope" and rope.get("short_factor") == rope.get("long_factor")
    if not constant:
        raise UserError(
            f"rope_parameters with rope_type = {shown_value(kind)} is not supported; expected one of "
            f"{', '.join(CONSTANT_ROPES)}"
        )
    factor = rope.get("partial_rotary_factor", 1.0)
    if factor != 1.0 and not partial:
        raise UserError(f"partial_rotary_factor = {factor} is not supported for {hf.model_type}; expected 1.0")
    dim, scaling = int(head_dim * factor), 1.0
    if dim < 2:
        raise UserError(f"partial_rotary_factor = {factor} leaves no pair of a head of {head_dim}; expected more")
    try:
        if kind == "default":
            frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
        else:
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:  # from unchecked fields
        raise UserError(
            f"rope_parameters = {shown_value(rope)} cannot be computed ({type(error).__name__}: {error}); "
            f"expected what rope_type {shown_value(kind)} of transformers needs"
        ) from error
    return RotarySpec(
        2 * len(frequencies), interleaved=False, inv_freq=tuple(frequencies.tolist()), attention_scaling=scaling
    )


def _require(hf: PretrainedConfig, **switches: object) -> None:
    """Raises UserError for a switch of another value. None counts as False, as in transformers' models."""
    for name, expected in switches.items():
        if (got := getattr(hf, name, expected)) != expected and (got is not None or expected is not False):
            raise UserError(
                f"{name} = {shown_value(got)} is not supported for {hf.model_type}; expected {shown_value(expected)}"
            )
