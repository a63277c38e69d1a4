"""Small encoders, vanilla and fused, with inputs for them."""

from functools import cache
from typing import Any

import torch
from helpers.models.small_models import randomised
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    DistilBertConfig,
    PreTrainedModel,
    RobertaConfig,
)

import labkit
from labkit.engine import InferenceEngine

TOKENS: dict[str, Any] = {"vocab_size": 131, "max_position_embeddings": 64, "pad_token_id": 0}


SIZES = {"hidden_size": 60, "num_attention_heads": 3, "num_hidden_layers": 3, "intermediate_size": 100}


CONFIGS = {
    "bert": lambda: BertConfig(**TOKENS, **SIZES),
    "roberta": lambda: RobertaConfig(**TOKENS, **SIZES, hidden_act="gelu_new", layer_norm_eps=1e-3),
    "distilbert": lambda: DistilBertConfig(**TOKENS, dim=60, n_heads=3, n_layers=3, hidden_dim=100),
}


TASKS = {
    "base": AutoModel,
    "fill-mask": AutoModelForMaskedLM,
    "token-classification": AutoModelForTokenClassification,
    "text-classification": AutoModelForSequenceClassification,
    "question-answering": AutoModelForQuestionAnswering,
}


RIGHT, LEFT, HOLES = [1] * 9 + [0] * 4, [0] * 5 + [1] * 8, [1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0]
MASKS = {
    "none": None,
    "all": torch.ones(3, 13, dtype=torch.int64),
    "right": torch.tensor([RIGHT, [1] * 13, [1] + [0] * 12]),
    "left": torch.tensor([LEFT, [1] * 13, [0] * 12 + [1]]),
    "scattered": torch.tensor([HOLES, LEFT, RIGHT]),
}


IDS = torch.randint(5, 131, (3, 13), generator=torch.Generator().manual_seed(0))


FLOAT32 = 1e-4


@cache
def vanilla(name: str, task: str = "base") -> PreTrainedModel:
    config = CONFIGS[name]()
    config.num_labels = 2 if task == "question-answering" else 3
    return randomised(TASKS[task].from_config(config))


def in_groups(name: str) -> PreTrainedModel:
    """Model whose matrices have whole groups of 64 inputs."""
    config = CONFIGS[name]()
    config.hidden_size, config.num_attention_heads = 64, 4
    setattr(config, "hidden_dim" if name == "distilbert" else "intermediate_size", 128)
    return randomised(AutoModel.from_config(config))


@cache
def fused(name: str, task: str = "base", impl: str = "cpp", dtype: torch.dtype = torch.float32) -> InferenceEngine:
    return labkit.init_inference(vanilla(name, task), dtype=dtype, impl=impl, replace_with_kernel_inject=True)


def answer(model: Any, mask: Tensor | None = None, **options: Any) -> Any:
    with torch.no_grad():
        return model(IDS, attention_mask=mask, **options)


def assert_same(actual: Any, expected: Any, mask: Tensor | None = None) -> None:
    """Compares every tensor of two outputs, at the visible positions if the tensor has positions."""
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        visible = slice(None) if mask is None or tensor.shape[:2] != mask.shape else mask.bool()
        assert actual[key].dtype == tensor.dtype
        assert (actual[key] - tensor)[visible].abs().max() <= FLOAT32, key
