"""What each rank does with models whose rows are derived: the tokens of transformers, by how the model is divided."""

from typing import Any

import torch
from helpers.models.any_models import any_model, texts

import labkit
from labkit.engine.engine import DecoderEngine

NAMES = ("bart", "falcon", "granite", "mpt", "nanochat", "phi3", "solar_open", "whisper")
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon 40B": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 32}),
    "glm 4.5": ("glm4_moe", {"first_k_dense_replace": 0, "routed_scaling_factor": 2.5}),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in NAMES} | OTHERS


def derived_on_ranks(option: str, size: int) -> dict[str, bool]:
    """Whether each model has an engine with a row that gives transformers' tokens."""
    torch.set_num_threads(1)
    right = {}
    for name, (kind, changes) in MODELS.items():
        model = any_model(kind, **changes)
        how = {"tensor_parallel": {"tp_size": size}, "pipeline_parallel": {"pp_size": size}}[option]
        engine = labkit.init_inference(model, dtype=torch.float32, **{option: how})
        right[name] = isinstance(engine, DecoderEngine) and torch.equal(texts(engine), texts(model))
        engine.destroy()
    return right
