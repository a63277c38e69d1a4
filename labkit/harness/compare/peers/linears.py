"""Replaces GPT-2's transposed matrices by linears, which other libraries can quantise and pack."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


def put_linears(model: PreTrainedModel) -> None:
    """Replaces each `Conv1D` of the model by an equal `nn.Linear`."""
    for path, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            model.set_submodule(path, _linear(module))


def _linear(module: Conv1D) -> nn.Linear:
    inputs, outputs = module.weight.shape
    linear = nn.Linear(inputs, outputs, device="meta")
    linear.weight, linear.bias = nn.Parameter(module.weight.T.contiguous()), module.bias
    return linear
