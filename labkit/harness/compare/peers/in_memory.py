"""Libraries that quantise the vanilla model in memory. transformers runs the model with their matrices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from labkit.harness.compare.loaded_side import LoadedSide
from labkit.harness.compare.loader import Room
from labkit.harness.compare.peers.peer import Peer
from labkit.harness.stored_weights import StoredWeights, name_of
from labkit.weights.source import ModelSource


class InMemory(Peer):
    """A peer whose sides compute in the dtype of the other sides, with weights of their own types."""

    converts: ClassVar = False

    def convert(self, side: str, source: ModelSource, dtype: str, folder: Path) -> None:
        raise AssertionError(f"{side} takes the vanilla model")

    def load(self, side: str, folder: Path, source: ModelSource, dtype: torch.dtype, room: Room) -> LoadedSide:
        api = self.import_package()
        torch.set_num_threads(room.threads)
        model = source.hf_model(dtype)
        put_linears(model)
        return self.quantised(api, side, source, model)

    @abstractmethod
    def quantised(self, api: Any, side: str, source: ModelSource, model: PreTrainedModel) -> LoadedSide:
        """The side that runs this model. The library changes the model, which has no `Conv1D`, in place."""


def stored(
    model: PreTrainedModel, name: str, bytes_of: Callable[[nn.Linear], int], *, quantised_head: bool, computes: str
) -> StoredWeights:
    """Stored type of a model's linears. `bytes_of` counts the bytes of a linear with its scales."""
    head = model.get_output_embeddings()
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]

    def bits(linears: list[nn.Linear]) -> float:
        return 8 * sum(map(bytes_of, linears)) / sum(linear.in_features * linear.out_features for linear in linears)

    return StoredWeights(
        name=name,
        bits=bits(layers),
        head=name if quantised_head else name_of(model.dtype),
        head_bits=bits([head]),
        computes=computes,
    )


def put_linears(model: PreTrainedModel) -> None:
    """Replaces each `Conv1D` of the model, as GPT-2 has them, by an equal `nn.Linear`, which libraries can quantise."""
    for path, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            model.set_submodule(path, _linear(module))


def _linear(module: Conv1D) -> nn.Linear:
    inputs, outputs = module.weight.shape
    linear = nn.Linear(inputs, outputs, device="meta")
    linear.weight, linear.bias = nn.Parameter(module.weight.T.contiguous()), module.bias
    return linear
