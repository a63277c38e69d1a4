"""What each rank does with models whose rows are derived: the tokens of transformers, by how the model is divided."""

import torch
from helpers.models.any_models import any_model, texts

import labkit
from labkit.engine.engine import DecoderEngine

NAMES = ("bart", "falcon", "granite", "mpt", "nanochat", "phi3", "whisper")


def derived_on_ranks(option: str, size: int) -> dict[str, bool]:
    """Whether each model has an engine with a row that gives transformers' tokens."""
    torch.set_num_threads(1)
    right = {}
    for name in NAMES:
        model = any_model(name)
        how = {"tensor_parallel": {"tp_size": size}, "pipeline_parallel": {"pp_size": size}}[option]
        engine = labkit.init_inference(model, dtype=torch.float32, **{option: how})
        right[name] = isinstance(engine, DecoderEngine) and torch.equal(texts(engine), texts(model))
        engine.destroy()
    return right
