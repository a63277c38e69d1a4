"""The tensors of a model in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.models.shards import Cut, cut_of
from labkit.models.tensor_names import unwrapped
from labkit.weights.protocol import require_floats


class ModelTensors:
    """The tensors of a model in memory whose names begin with `prefix`. `release` frees a layer's tensors, so that the
    model is not in memory twice while it is packed. Names are without the wrappers of torch.compile.
    """

    copies_to_convert = True

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        self.model = model
        tensors = {unwrapped(name): tensor for name, tensor in model.state_dict().items()}
        self._tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    def names(self) -> set[str]:
        return set(self._tensors)

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor:
        stored = require_floats(self._tensors[name].detach(), name, f"in this {type(self.model).__name__}")
        tensor = cut_of(name, stored, cut)
        return tensor if dtype is None else tensor.to(dtype)

    def release(self, prefix: str) -> None:
        parameters = {unwrapped(name): parameter for name, parameter in self.model.named_parameters()}
        for name in [name for name in self._tensors if name.startswith(prefix)]:
            del self._tensors[name]
            if name in parameters:
                parameters[name].data = torch.empty(0)
