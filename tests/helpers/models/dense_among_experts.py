"""Small models in which some layers have an MLP where the others have experts."""

from typing import Any

from helpers.models.any_models import any_model
from transformers import PreTrainedModel

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "glm-4.5": ("glm4_moe", {"first_k_dense_replace": 2, "routed_scaling_factor": 2.5}),
    "qwen3 list": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen2 step": ("qwen2_moe", {"decoder_sparse_step": 2}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dots1": (
        "dots1",
        {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 1},
    ),
    "ernie-4.5": ("ernie4_5_moe", {"moe_layer_start_index": 2}),
    "exaone": ("exaone_moe", {}),
    "hy": ("hy_v3", {}),
}


def dense_model(name: str, **changes: Any) -> PreTrainedModel:
    kind, given = (DENSE | OTHERS)[name]
    return any_model(kind, **given | changes)
