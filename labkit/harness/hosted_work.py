"""The least work of a model without a row: what its matrices cost, without its cache and the rest of its attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from labkit.engine.injected.modules import packed_matrices
from labkit.harness.roofline import Work
from labkit.harness.stored_weights import StoredWeights, Weights
from labkit.models.derived.small_config import EXPERT_COUNTS


def matrix_numbers(model: Any) -> int | None:
    """The numbers in the matrices by which each token is multiplied, of transformers' model or of an engine with hooks.

    None: not every token is multiplied by all of them (experts, an encoder), or the model has no such matrices.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None or getattr(config, "is_encoder_decoder", False):
        return None
    text = config.get_text_config(decoder=True)
    if any((getattr(text, name, None) or 0) > 1 for name in EXPERT_COUNTS):
        return None
    layers, head = packed_matrices(model)
    packed = {id(matrix): matrix.outputs * matrix.inputs for matrix in (*layers, *head)}
    linears = (module for module in model.modules() if isinstance(module, nn.Linear | Conv1D))
    plain = {id(linear.weight): linear.weight.numel() for linear in linears}
    return sum(packed.values()) + sum(plain.values()) or None


def work_of_matrices(numbers: int, weights: Weights, batch: int, prompt: int) -> Work:
    """The work of `batch` sequences. A step reads each of the numbers in the matrices once."""
    if isinstance(weights, StoredWeights):
        read = weights.bytes if weights.bytes is not None else round(numbers * weights.bits / 8)
    else:
        read = numbers * torch.empty(0, dtype=weights).element_size()
    return Work(
        decode_bytes=float(read),
        decode_flops=2.0 * numbers * batch,
        prefill_flops=2.0 * numbers * batch * prompt,
        weight_bytes=read,
        kv_bytes=0,
    )
