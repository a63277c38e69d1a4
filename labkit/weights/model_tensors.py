"""The tensors of a model in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labkit.models.shards import Cut, cut_of


class ModelTensors:
    """The tensors of a model in memory whose names begin with `prefix`. `release` frees those of a layer, so that a
    model need not be in memory twice while it is packed.
    """

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        self.model = model
        self._tensors = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(prefix)}

    def names(self) -> set[str]:
        return set(self._tensors)

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor:
        tensor = cut_of(name, self._tensors[name].detach(), cut)
        return tensor if dtype is None else tensor.to(dtype)

    def release(self, prefix: str) -> None:
        parameters = dict(self.model.named_parameters())
        for name in [name for name in self._tensors if name.startswith(prefix)]:
            del self._tensors[name]
            if name in parameters:
                parameters[name].data = torch.empty(0)
