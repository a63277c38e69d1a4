"""What the options leave open: the implementation, and the types of weights, keys and values."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from labkit.kernels import build, gpu
from labkit.kernels.types import float_dtype
from labkit.system.errors import UserError

log = logging.getLogger("labkit")


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


def chosen_impl(wanted: str) -> str:
    """What "auto" comes to on this machine; where it is not the fastest, one line on stderr says why."""
    if wanted == "auto" and torch.cuda.is_available() and gpu.unavailable() is None:
        return "triton"
    if wanted == "auto":
        reason = build.unavailable()
        if reason is None:
            return "cpp"
        log.warning("labkit: the reference kernels run, which are slow: %s", reason)
        return "reference"
    if wanted == "triton":
        gpu.require()
    if wanted == "cpp" and (reason := build.unavailable()):
        raise build.BuildError(reason)
    return wanted
