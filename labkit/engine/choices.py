"""Choices that the options leave open: the implementation, and the types of weights, keys and values."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from labkit.kernels import build, gpu
from labkit.kernels.types import float_dtype
from labkit.models.dtypes import DTYPES
from labkit.system.errors import UserError

log = logging.getLogger("labkit")


def stored_dtype(requested: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """Returns the type of stored keys and values, for matrices of `dtype`."""
    own = float_dtype(dtype)
    if requested not in (None, own, torch.int8):
        raise UserError(
            f"got kv_dtype={requested} with dtype={dtype}; expected None or {own}, which is the same, or int8"
        )
    return requested or own


def matrix_dtype(requested: torch.dtype | None, model: Any, hf_config: PretrainedConfig) -> torch.dtype:
    """Returns the type of the layers' matrices: the requested one, or the model's own."""
    dtype = requested or _own_dtype(model, hf_config)
    if dtype not in DTYPES.values():
        raise UserError(f"the model is {dtype}; pass dtype=torch.float32, bfloat16, float16 or int8")
    return dtype


def _own_dtype(model: Any, hf_config: PretrainedConfig) -> torch.dtype:
    """Returns the type of the passed model, or of its config."""
    if isinstance(model, PreTrainedModel):
        return model.dtype
    dtype = getattr(hf_config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def chosen_impl(requested: str) -> str:
    """Returns the implementation for this machine. If "auto" does not get a fast one, one line on stderr says why."""
    if requested == "auto" and torch.cuda.is_available() and gpu.unavailable() is None:
        return "triton"
    if requested == "auto":
        reason = build.unavailable()
        if reason is None:
            return "cpp"
        log.warning("labkit: the reference kernels run, which are slow: %s", reason)
        return "reference"
    if requested == "triton":
        gpu.require()
    if requested == "cpp" and (reason := build.unavailable()):
        raise build.BuildError(reason)
    return requested
