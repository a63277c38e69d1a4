"""The architectures of GGUF files that labkit reads, and the fields of transformers' configs that each one describes.

What a file does not say is what llama.cpp assumes for its architecture.
"""

from __future__ import annotations

from collections.abc import Mapping

from labkit.system.errors import UserError
from labkit.weights.gguf.described import EXPERTS, QUERY_BIAS, Described, Fields, GgufArchitecture, rms_of, sizes_of
from labkit.weights.gguf.mixtures import MIXTURES, experts_of, granite

GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}  # whose queries are scaled by the width of a head, not by its size
GEMMA_WINDOWS = {"gemma2": 4096, "gemma3": 1024}
LOCAL_THETA = 10_000.0  # of Gemma 3's layers with a window


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


def _llama(file: Described) -> Fields:
    """A LLaMA or a Mistral, or with experts a Mixtral."""
    if not file.size("expert_count"):
        return sizes_of(file) | rms_of(file)
    return (
        sizes_of(file, experts=EXPERTS[:1])
        | rms_of(file)
        | experts_of(file, "num_local_experts")
        | {"model_type": "mixtral"}
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
    sizes = sizes_of(file, partial=True) | rms_of(file)
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
    return _llama(file) | {"model_type": "olmo3", "sliding_window": window, "layer_types": file.window_kinds(4)}


def _starcoder2(file: Described) -> Fields:
    return sizes_of(file) | {
        "norm_epsilon": file.needed_number("attention.layer_norm_epsilon"),
        "use_bias": QUERY_BIAS in file.tensors,
        "sliding_window": None,
    }


def _stablelm(file: Described) -> Fields:
    sizes = sizes_of(file, partial=True)
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
    return sizes_of(file, scales=("logit_scale",)) | {
        "layer_norm_eps": file.needed_number("attention.layer_norm_epsilon"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "logit_scale": file.needed_number("logit_scale"),
    }


def _glm4(file: Described) -> Fields:
    return sizes_of(file, partial=True) | rms_of(file) | {"attention_bias": QUERY_BIAS in file.tensors}


def _seed_oss(file: Described) -> Fields:
    outputs = {"attention_out_bias": "blk.0.attn_output.bias" in file.tensors}
    return _llama(file) | {"attention_bias": QUERY_BIAS in file.tensors} | outputs


def _nemotron(file: Described) -> Fields:
    return sizes_of(file, partial=True) | {"norm_eps": file.needed_number("attention.layer_norm_epsilon")}


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", _llama, pairs_together=True),
    "qwen2": GgufArchitecture("qwen2", _llama),
    "qwen3": GgufArchitecture("qwen3", _llama),
    "gemma2": GgufArchitecture("gemma2", _gemma2),
    "gemma3": GgufArchitecture("gemma3_text", _gemma3),
    "phi3": GgufArchitecture("phi3", _phi3),
    "olmo2": GgufArchitecture("olmo2", _olmo2),
    "granite": GgufArchitecture("granite", granite, pairs_together=True),
    "smollm3": GgufArchitecture("smollm3", _llama, pairs_together=True),
    "starcoder2": GgufArchitecture("starcoder2", _starcoder2),
    "stablelm": GgufArchitecture("stablelm", _stablelm),
    "command-r": GgufArchitecture("cohere", _cohere),
    "glm4": GgufArchitecture("glm4", _glm4),
    "seed_oss": GgufArchitecture("seed_oss", _seed_oss),
    "nemotron": GgufArchitecture("nemotron", _nemotron),
    **MIXTURES,
    "gpt2": GgufArchitecture("gpt2", _gpt2, rotary=False),
    "bloom": GgufArchitecture("bloom", _bloom, rotary=False),
}
