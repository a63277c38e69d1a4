"""The architectures of GGUF files that labkit reads, and the fields of transformers' configs that each one describes.

What a file does not say is what llama.cpp assumes for its architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.models.config_checks import check_fields
from labkit.system.errors import UserError
from labkit.weights.gguf.header import StoredTensor
from labkit.weights.gguf.metadata import Metadata

GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}  # whose queries are scaled by the width of a head, not by its size
GEMMA_WINDOWS = {"gemma2": 4096, "gemma3": 1024}
LOCAL_THETA = 10_000.0  # of Gemma 3's layers with a window
# llama.cpp computes with these. An architecture that does not name them as its own cannot have them.
SCALES = ("attention.scale", "attention.clamp_kqv", "logit_scale", "embedding_scale", "residual_scale")
EXPERTS = ("expert_count", "expert_shared_feed_forward_length", "leading_dense_block_count", "expert_group_count")
QUERY_BIAS = "blk.0.attn_q.bias"


@dataclass(frozen=True)
class Described:
    """The metadata of a file, by keys without its architecture, and its tensors."""

    architecture: str
    metadata: Metadata
    tensors: Mapping[str, StoredTensor]

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def size(self, name: str) -> int | None:
        return self.metadata.size(self.key(name))

    def needed_size(self, name: str) -> int:
        return self.metadata.needed_size(self.key(name))

    def number(self, name: str) -> float | None:
        return self.metadata.number(self.key(name))

    def flag(self, name: str) -> bool | None:
        return self.metadata.flag(self.key(name))

    def needed_number(self, name: str) -> float:
        value = self.number(name)
        if value is None:
            raise UserError(f"{self.metadata.path} has no {self.key(name)}; convert it again")
        return value

    def numbers(self, **fields: str) -> dict[str, float]:
        """The numbers that the file has, by the names of transformers' fields."""
        values = {field: self.number(name) for field, name in fields.items()}
        return {field: value for field, value in values.items() if value is not None}


Fields = dict[str, Any]


@dataclass(frozen=True)
class GgufArchitecture:
    """An architecture of GGUF files.

    model_type: transformers' name, unless `read` gives another one.
    read: the fields of transformers' config; "partial_rotary_factor", "local_theta" and "truncate" (of YaRN) are of its
        `rope_parameters`.
    rotary: the positions are rotary, and the file may scale them.
    pairs_together: the two rows of a rotary pair of queries and keys lie next to each other.
    """

    model_type: str
    read: Callable[[Described], Fields]
    rotary: bool = True
    pairs_together: bool = False


def _gpt2(file: Described) -> Fields:
    return {
        "n_embd": file.needed_size("embedding_length"),
        "n_layer": file.needed_size("block_count"),
        "n_head": file.needed_size("attention.head_count"),
        "n_inner": file.size("feed_forward_length"),
        "n_positions": file.needed_size("context_length"),
        "layer_norm_epsilon": file.needed_number("attention.layer_norm_epsilon"),
    }


def _bloom(file: Described) -> Fields:
    return {
        "hidden_size": file.needed_size("embedding_length"),
        "n_layer": file.needed_size("block_count"),
        "n_head": file.needed_size("attention.head_count"),
        "layer_norm_epsilon": file.needed_number("attention.layer_norm_epsilon"),
    }


def _sizes(
    file: Described, *, scales: tuple[str, ...] = (), partial: bool = False, experts: tuple[str, ...] = ()
) -> Fields:
    """The sizes of a model with rotary positions.

    scales: the keys of SCALES that the caller reads.
    partial: a part of a head may be rotated.
    experts: the keys of EXPERTS that the caller reads.
    """
    present = [key for key in SCALES if key not in scales and file.number(key)]
    present += [key for key in EXPERTS if key not in experts and file.size(key)]
    present += ["attention.causal"] if file.flag("attention.causal") is False else []
    path = file.metadata.path
    if present:
        raise UserError(f"{path} has {file.key(present[0])}, which is not supported")
    width, heads = file.needed_size("embedding_length"), file.needed_size("attention.head_count")
    check_fields({"hidden_size": width, "num_attention_heads": heads}, str(path))
    head_dim = file.size("attention.key_length") or width // heads
    rotated = file.size("rope.dimension_count") or head_dim
    for key in ("attention.value_length", *(() if partial else ("rope.dimension_count",))):
        if (size := file.size(key) or head_dim) != head_dim:
            raise UserError(
                f"{path}: {file.key(key)} is {size} with heads of {head_dim}; expected {head_dim}: other sizes of "
                "values or of the rotary part are not supported"
            )
    if rotated > head_dim:
        raise UserError(f"{path}: {file.key('rope.dimension_count')} is {rotated} with heads of {head_dim}")
    kv_heads = file.size("attention.head_count_kv")
    sizes = {
        "hidden_size": width,
        "intermediate_size": file.needed_size("feed_forward_length"),
        "num_hidden_layers": file.needed_size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": file.needed_size("context_length"),
    }
    return sizes | ({"partial_rotary_factor": rotated / head_dim} if partial else {})


def _rms(file: Described) -> Fields:
    return {"rms_norm_eps": file.needed_number("attention.layer_norm_rms_epsilon")}


def _llama(file: Described) -> Fields:
    """A LLaMA or a Mistral, or with experts a Mixtral."""
    if not file.size("expert_count"):
        return _sizes(file) | _rms(file)
    return (
        _sizes(file, experts=EXPERTS[:1]) | _rms(file) | _experts(file, "num_local_experts") | {"model_type": "mixtral"}
    )


def _experts(file: Described, name: str) -> Fields:
    """name: transformers' name of the number of experts."""
    used = file.needed_size("expert_used_count")
    return {name: file.needed_size("expert_count"), "num_experts_per_tok": used}


def _qwen3_moe(file: Described) -> Fields:
    inner = {"moe_intermediate_size": file.needed_size("expert_feed_forward_length"), "norm_topk_prob": True}
    return _sizes(file, experts=EXPERTS[:1]) | _rms(file) | _experts(file, "num_experts") | inner


def _qwen2_moe(file: Described) -> Fields:
    """llama.cpp takes other widths from the tensors where the file does not say them."""
    sizes = _sizes(file, experts=EXPERTS[:2])
    sizes.pop("head_dim")  # transformers' config has none
    return (
        sizes
        | _rms(file)
        | _experts(file, "num_experts")
        | {
            "moe_intermediate_size": file.needed_size("expert_feed_forward_length"),
            "shared_expert_intermediate_size": file.needed_size("expert_shared_feed_forward_length"),
            "norm_topk_prob": False,
            "qkv_bias": QUERY_BIAS in file.tensors,
        }
    )


def _olmoe(file: Described) -> Fields:
    sizes = _sizes(file, experts=EXPERTS[:1])
    sizes.pop("head_dim")
    return sizes | _rms(file) | _experts(file, "num_experts") | {"norm_topk_prob": False}


def _granite_moe(file: Described) -> Fields:
    return _granite(file, experts=EXPERTS[:1]) | _experts(file, "num_local_experts")


def _gpt_oss(file: Described) -> Fields:
    """llama.cpp knows which layers have windows: the first, the third, and so on, as transformers does."""
    return (
        _sizes(file, experts=EXPERTS[:1])
        | _rms(file)
        | _experts(file, "num_local_experts")
        | {
            "intermediate_size": file.needed_size("expert_feed_forward_length"),
            "sliding_window": file.needed_size("attention.sliding_window"),
            "attention_bias": QUERY_BIAS in file.tensors,
            "truncate": False,
        }
    )


def _gemma2(file: Described) -> Fields:
    caps = file.numbers(
        attn_logit_softcapping="attn_logit_softcapping", final_logit_softcapping="final_logit_softcapping"
    )
    return _llama(file) | _gemma(file) | caps


def _gemma3(file: Described) -> Fields:
    theta = file.number("rope.freq_base_swa")
    caps = file.numbers(final_logit_softcapping="final_logit_softcapping")
    return _llama(file) | _gemma(file) | caps | {"local_theta": LOCAL_THETA if theta is None else theta}


def _gemma(file: Described) -> Fields:
    """The window, and the scale of queries, which llama.cpp knows by the number of layers."""
    width = file.needed_size("embedding_length") // file.needed_size("attention.head_count")
    large = file.needed_size("block_count") == GEMMA_27B_LAYERS[file.architecture]
    return {
        "query_pre_attn_scalar": width if large else file.size("attention.key_length") or width,
        "sliding_window": file.size("attention.sliding_window") or GEMMA_WINDOWS[file.architecture],
    }


def _phi3(file: Described) -> Fields:
    sizes = _sizes(file, partial=True) | _rms(file)
    original = file.size("rope.scaling.original_context_length")
    return sizes | {
        "sliding_window": file.size("attention.sliding_window") or None,  # Phi-4's files have 0
        "original_max_position_embeddings": original or sizes["max_position_embeddings"],
    }


def _olmo2(file: Described) -> Fields:
    """OLMo 2, or OLMo 3, which has windows."""
    window = file.size("attention.sliding_window")
    if not window:
        return _llama(file)
    layers = file.needed_size("block_count")
    pattern = file.metadata.flags(file.key("attention.sliding_window_pattern"))
    pattern = [(index + 1) % 4 != 0 for index in range(layers)] if pattern is None else pattern
    if len(pattern) != layers:
        raise UserError(f"{file.metadata.path} has windows of {len(pattern)} of {layers} layers; convert it again")
    if file.number("rope.freq_base_swa") not in (None, file.number("rope.freq_base")):
        raise UserError(f"{file.metadata.path}: {file.key('rope.freq_base_swa')} of its own is not supported")
    kinds = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    return _llama(file) | {"model_type": "olmo3", "sliding_window": window, "layer_types": kinds}


def _granite(file: Described, experts: tuple[str, ...] = ()) -> Fields:
    sizes = _sizes(
        file, experts=experts, scales=("attention.scale", "logit_scale", "embedding_scale", "residual_scale")
    )
    scales = file.numbers(
        attention_multiplier="attention.scale",
        embedding_multiplier="embedding_scale",
        residual_multiplier="residual_scale",
        logits_scaling="logit_scale",
    )
    return sizes | _rms(file) | {"attention_multiplier": sizes["head_dim"] ** -0.5} | scales


def _starcoder2(file: Described) -> Fields:
    return _sizes(file) | {
        "norm_epsilon": file.needed_number("attention.layer_norm_epsilon"),
        "use_bias": QUERY_BIAS in file.tensors,
        "sliding_window": None,
    }


def _stablelm(file: Described) -> Fields:
    sizes = _sizes(file, partial=True)
    head_dim = sizes.pop("head_dim")  # transformers' config has none
    if head_dim * sizes["num_attention_heads"] != sizes["hidden_size"]:
        raise UserError(
            f"{file.metadata.path}: {file.key('attention.key_length')} is {head_dim}; expected the width "
            "divided by the heads"
        )
    return sizes | {
        "layer_norm_eps": file.needed_number("attention.layer_norm_epsilon"),
        "use_parallel_residual": bool(file.flag("use_parallel_residual")),
        "use_qkv_bias": QUERY_BIAS in file.tensors,
    }


def _cohere(file: Described) -> Fields:
    return _sizes(file, scales=("logit_scale",)) | {
        "layer_norm_eps": file.needed_number("attention.layer_norm_epsilon"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "logit_scale": file.needed_number("logit_scale"),
    }


def _glm4(file: Described) -> Fields:
    return _sizes(file, partial=True) | _rms(file) | {"attention_bias": QUERY_BIAS in file.tensors}


def _seed_oss(file: Described) -> Fields:
    outputs = {"attention_out_bias": "blk.0.attn_output.bias" in file.tensors}
    return _llama(file) | {"attention_bias": QUERY_BIAS in file.tensors} | outputs


def _nemotron(file: Described) -> Fields:
    return _sizes(file, partial=True) | {"norm_eps": file.needed_number("attention.layer_norm_epsilon")}


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", _llama, pairs_together=True),
    "qwen2": GgufArchitecture("qwen2", _llama),
    "qwen3": GgufArchitecture("qwen3", _llama),
    "gemma2": GgufArchitecture("gemma2", _gemma2),
    "gemma3": GgufArchitecture("gemma3_text", _gemma3),
    "phi3": GgufArchitecture("phi3", _phi3),
    "olmo2": GgufArchitecture("olmo2", _olmo2),
    "granite": GgufArchitecture("granite", _granite, pairs_together=True),
    "smollm3": GgufArchitecture("smollm3", _llama, pairs_together=True),
    "starcoder2": GgufArchitecture("starcoder2", _starcoder2),
    "stablelm": GgufArchitecture("stablelm", _stablelm),
    "command-r": GgufArchitecture("cohere", _cohere),
    "glm4": GgufArchitecture("glm4", _glm4),
    "seed_oss": GgufArchitecture("seed_oss", _seed_oss),
    "nemotron": GgufArchitecture("nemotron", _nemotron),
    "qwen2moe": GgufArchitecture("qwen2_moe", _qwen2_moe),
    "qwen3moe": GgufArchitecture("qwen3_moe", _qwen3_moe),
    "olmoe": GgufArchitecture("olmoe", _olmoe),
    "granitemoe": GgufArchitecture("granitemoe", _granite_moe, pairs_together=True),
    "gpt-oss": GgufArchitecture("gpt_oss", _gpt_oss),
    "gpt2": GgufArchitecture("gpt2", _gpt2, rotary=False),
    "bloom": GgufArchitecture("bloom", _bloom, rotary=False),
}
