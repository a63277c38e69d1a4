"""The mixtures of experts among the architectures of GGUF files."""

from __future__ import annotations

from collections.abc import Mapping

from labkit.system.errors import UserError
from labkit.weights.gguf.described import EXPERTS, QUERY_BIAS, Described, Fields, GgufArchitecture, rms_of, sizes_of

SOFTMAX, SIGMOID = 1, 2  # GGUF's numbers of the scores of experts
KEY_NORM, QUERY_NORM = "blk.0.attn_k_norm.weight", "blk.0.attn_q_norm.weight"


def experts_of(file: Described, name: str, chosen: str = "num_experts_per_tok") -> Fields:
    """name: transformers' name of the number of experts. chosen: its name of the number of experts of a token."""
    count, used = file.needed_size("expert_count"), file.needed_size("expert_used_count")
    if used > count:
        raise UserError(
            f"{file.metadata.path}: {file.key('expert_used_count')} is {used} with {count} experts; expected at most "
            f"{count}: convert it again"
        )
    return {name: count, chosen: used}


def _check_scores(file: Described, number: int) -> None:
    """Raises UserError for scores that transformers' router does not have. number: of the router's scores."""
    given = file.size("expert_gating_func")
    if given not in (None, 0, number):
        raise UserError(
            f"{file.metadata.path}: {file.key('expert_gating_func')} is {given}; expected {number}, "
            f"{'softmax' if number == SOFTMAX else 'sigmoid'}: other scores of experts are not supported"
        )


def _shares(file: Described) -> Fields:
    """What becomes of the scores of the chosen experts."""
    return {
        "norm_topk_prob": bool(file.flag("expert_weights_norm")),
        "routed_scaling_factor": file.number("expert_weights_scale") or 1.0,
    }


def _first_dense(file: Described) -> int:
    """The number of layers with an MLP, before those with experts."""
    dense = file.size("leading_dense_block_count") or 0
    if dense >= file.layers:
        raise UserError(
            f"{file.metadata.path}: {file.key('leading_dense_block_count')} is {dense}; expected less than the "
            f"{file.layers} layers: convert it again"
        )
    return dense


def _shared_experts(file: Described) -> int:
    """The number of experts that are as wide as the shared one."""
    inner, width = file.needed_size("expert_feed_forward_length"), file.size("expert_shared_feed_forward_length")
    count = file.size("expert_shared_count")
    if count is None:
        count = (width or 0) // max(inner, 1)
    if width and width != count * inner:
        raise UserError(
            f"{file.metadata.path}: {file.key('expert_shared_feed_forward_length')} is {width}; expected "
            f"{count * inner}, {count} times the width of an expert: convert it again"
        )
    return count


def _beside_dense(
    file: Described, count: str, shared: str, dense: str = "first_k_dense_replace", chosen: str = "num_experts_per_tok"
) -> Fields:
    """Experts in all layers but the first ones, beside shared experts of the same width.

    count, shared, dense, chosen: transformers' names of the numbers of experts, of shared ones, of layers without
    experts, and of experts of a token.
    """
    return experts_of(file, count, chosen) | {
        "moe_intermediate_size": file.needed_size("expert_feed_forward_length"),
        shared: _shared_experts(file),
        dense: _first_dense(file),
    }


def _qwen3_moe(file: Described) -> Fields:
    inner = {"moe_intermediate_size": file.needed_size("expert_feed_forward_length"), "norm_topk_prob": True}
    return sizes_of(file, experts=EXPERTS[:1]) | rms_of(file) | experts_of(file, "num_experts") | inner


def _qwen2_moe(file: Described) -> Fields:
    """llama.cpp takes other widths from the tensors where the file does not say them."""
    sizes = sizes_of(file, experts=EXPERTS[:2])
    sizes.pop("head_dim")  # transformers' config has none
    return (
        sizes
        | rms_of(file)
        | experts_of(file, "num_experts")
        | {
            "moe_intermediate_size": file.needed_size("expert_feed_forward_length"),
            "shared_expert_intermediate_size": file.needed_size("expert_shared_feed_forward_length"),
            "norm_topk_prob": False,
            "qkv_bias": QUERY_BIAS in file.tensors,
        }
    )


def _olmoe(file: Described) -> Fields:
    sizes = sizes_of(file, experts=EXPERTS[:1])
    sizes.pop("head_dim")
    return sizes | rms_of(file) | experts_of(file, "num_experts") | {"norm_topk_prob": False}


def _granite_moe(file: Described) -> Fields:
    """A Granite-MoE, with or without a shared expert."""
    fields = granite(file, experts=EXPERTS[:2]) | experts_of(file, "num_local_experts")
    if not (shared := file.size("expert_shared_feed_forward_length")):
        return fields
    return fields | {"model_type": "granitemoeshared", "shared_intermediate_size": shared}


def _glm4_moe(file: Described) -> Fields:
    """A GLM-4-MoE, or a Solar Open, which is one without dense layers and with whole heads rotated."""
    _check_scores(file, SIGMOID)
    inner = None if _first_dense(file) else file.needed_size("expert_feed_forward_length")
    return (
        sizes_of(file, partial=True, experts=EXPERTS, inner=inner)
        | rms_of(file)
        | _beside_dense(file, "n_routed_experts", "n_shared_experts")
        | _shares(file)
        | {
            "num_mtp_layers": 0,
            "attention_bias": QUERY_BIAS in file.tensors,
            "use_qk_norm": {QUERY_NORM, KEY_NORM} <= file.tensors.keys(),
        }
    )


def _dots1(file: Described) -> Fields:
    _check_scores(file, SIGMOID)
    return (
        sizes_of(file, experts=EXPERTS)
        | rms_of(file)
        | _beside_dense(file, "n_routed_experts", "n_shared_experts")
        | _shares(file)
        | {"sliding_window": None}
    )


def _ernie4_5_moe(file: Described) -> Fields:
    """llama.cpp always divides the scores of the chosen experts by their sum."""
    _check_scores(file, SOFTMAX)
    step = file.size("interleave_moe_layer_step") or 1
    return (
        sizes_of(file, experts=EXPERTS)
        | rms_of(file)
        | _beside_dense(file, "moe_num_experts", "moe_num_shared_experts", "moe_layer_start_index", "moe_k")
        | {"moe_layer_interval": step}
    )


def _exaone_moe(file: Described) -> Fields:
    """Layers without a window rotate no positions, in llama.cpp as in transformers."""
    _check_scores(file, SIGMOID)
    return (
        sizes_of(file, experts=EXPERTS)
        | rms_of(file)
        | _beside_dense(file, "num_experts", "num_shared_experts")
        | _shares(file)
        | {
            "sliding_window": file.needed_size("attention.sliding_window"),
            "layer_types": file.window_kinds(4),
        }
    )


def _minimax_m2(file: Described) -> Fields:
    _check_scores(file, SIGMOID)
    sizes = sizes_of(file, partial=True, experts=EXPERTS[:1])
    return sizes | rms_of(file) | experts_of(file, "num_local_experts")


def _gpt_oss(file: Described) -> Fields:
    """llama.cpp knows which layers have windows: the first, the third, and so on, as transformers does."""
    return (
        sizes_of(file, experts=EXPERTS[:1])
        | rms_of(file)
        | experts_of(file, "num_local_experts")
        | {
            "intermediate_size": file.needed_size("expert_feed_forward_length"),
            "sliding_window": file.needed_size("attention.sliding_window"),
            "attention_bias": QUERY_BIAS in file.tensors,
            "truncate": False,
        }
    )


def granite(file: Described, experts: tuple[str, ...] = ()) -> Fields:
    sizes = sizes_of(
        file, experts=experts, scales=("attention.scale", "logit_scale", "embedding_scale", "residual_scale")
    )
    scales = file.numbers(
        attention_multiplier="attention.scale",
        embedding_multiplier="embedding_scale",
        residual_multiplier="residual_scale",
        logits_scaling="logit_scale",
    )
    return sizes | rms_of(file) | {"attention_multiplier": sizes["head_dim"] ** -0.5} | scales


MIXTURES: Mapping[str, GgufArchitecture] = {
    "qwen2moe": GgufArchitecture("qwen2_moe", _qwen2_moe),
    "qwen3moe": GgufArchitecture("qwen3_moe", _qwen3_moe),
    "olmoe": GgufArchitecture("olmoe", _olmoe),
    "granitemoe": GgufArchitecture("granitemoe", _granite_moe, pairs_together=True),
    "gpt-oss": GgufArchitecture("gpt_oss", _gpt_oss),
    "glm4moe": GgufArchitecture("glm4_moe", _glm4_moe),
    "dots1": GgufArchitecture("dots1", _dots1),
    "ernie4_5-moe": GgufArchitecture("ernie4_5_moe", _ernie4_5_moe),
    "exaone-moe": GgufArchitecture("exaone_moe", _exaone_moe),
    "minimax-m2": GgufArchitecture("minimax_m2", _minimax_m2),
}
