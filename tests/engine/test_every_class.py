"""Every causal class of transformers generates its own tokens on the level that it gets."""

import pytest
import torch
from helpers.models.any_models import any_model, texts
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import labkit

ENCODERS = ("bert", "roberta")  # rows of encoders, whose engines generate no text


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in ENCODERS])
def test_a_class_generates_its_own_tokens(model_type: str) -> None:
    try:
        model = any_model(model_type)
        expected = texts(model, new=6)
    except Exception as error:  # noqa: BLE001 - transformers' own code fails on its default config
        pytest.skip(f"transformers: {type(error).__name__}")
    assert torch.equal(texts(labkit.init_inference(model, dtype=torch.float32), new=6), expected)
