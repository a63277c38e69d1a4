"""GPT-2's transposed matrices in the form that other libraries know how to quantise and to pack."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


def put_linears(model: PreTrainedModel) -> None:
    """Exchange each `Conv1D` of the model for the `nn.Linear` that computes the same."""
    for path, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            model.set_submodule(path, _linear(module))


def _linear(module: Conv1D) -> nn.Linear:
    inputs, outputs = module.weight.shape
    linear = nn.Linear(inputs, outputs, device="meta")
    linear.weight, linear.bias = nn.Parameter(module.weight.T.contiguous()), module.bias
    return linear
