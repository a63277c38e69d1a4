"""Small random models of any causal class that transformers has, and tokens for them."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from labkit.models.derived.small_config import small_config
from labkit.models.derived.small_models import small_model


def any_model(model_type: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A small model of this type in float32. changes: of fields of its usual config."""
    return small_model(small_config(CONFIG_MAPPING[model_type](**changes)), seed=seed)


def padded_tokens(length: int = 9) -> tuple[Tensor, Tensor]:
    """Two sequences of tokens, the first one with padding, and their mask."""
    ids = torch.randint(3, 100, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return ids, mask


def texts(model: Any, new: int = 8) -> Tensor:
    """Greedy tokens of the padded sequences."""
    ids, mask = padded_tokens()
    tokens: Tensor = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=new, eos_token_id=None, pad_token_id=0
    )
    return tokens
