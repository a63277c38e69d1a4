"""What each rank does with models whose rows are derived: the tokens of transformers, by how the model is divided."""

from typing import Any

import torch
from helpers.models.any_models import any_model, padded_tokens, texts
from helpers.models.long_ropes import SHORT, long_rope_model

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


def long_rope_on_ranks(option: str, size: int) -> dict[str, bool]:
    """Whether a model with another rotation in long texts gives the tokens of transformers. The texts stay short,
    outgrow the first rotation, or begin long.
    """
    torch.set_num_threads(1)
    model = long_rope_model()
    how = {"tensor_parallel": {"tp_size": size}, "pipeline_parallel": {"pp_size": size}}[option]
    engine = labkit.init_inference(model, dtype=torch.float32, **{option: how})
    return {
        f"{length} tokens{', with logits' * as_dict}": torch.equal(
            *(_text(side, length, as_dict) for side in (engine, model))
        )
        for length in (9, SHORT - 3, SHORT + 50)
        for as_dict in (False, True)
    }


def _text(side: Any, length: int, as_dict: bool) -> torch.Tensor:
    ids, mask = padded_tokens(length)
    options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True} if as_dict else {}
    generated = side.generate(ids, attention_mask=mask, **options)
    tokens: torch.Tensor = generated.sequences if as_dict else generated
    return tokens
