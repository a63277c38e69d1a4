"""The types that weights, keys and values have where the options leave them open."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from labkit.kernels.types import float_dtype
from labkit.system.errors import UserError


def stored_dtype(wanted: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """As keys and values are stored beside matrices of `dtype`."""
    own = float_dtype(dtype)
    if wanted not in (None, own, torch.int8):
        raise UserError(
            f"got kv_dtype={wanted} beside dtype={dtype}; expected None or {own}, which is the same, or int8"
        )
    return wanted or own


def own_dtype(model: Any, hf_config: PretrainedConfig) -> torch.dtype:
    """Of a model as it was given, or as its config says."""
    if isinstance(model, PreTrainedModel):
        return model.dtype
    dtype = getattr(hf_config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
