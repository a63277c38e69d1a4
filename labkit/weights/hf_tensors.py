"""The tensors of transformers' own model, from a source that may keep the matrices of experts in another way."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from labkit.models.config import ModelConfig, Shapes
from labkit.models.policies import find_policy, known_policy
from labkit.models.policy import Policy
from labkit.models.shards import Cut, shard
from labkit.models.tensor_names import stored_buffers
from labkit.system.errors import UserError
from labkit.weights.protocol import TensorSource

OF_EXPERTS = ("ff1", "ff2", "router", "shared_ff1")


def fill(model: PreTrainedModel, source: TensorSource, *, copies: bool) -> None:
    """Gives an empty model the tensors of a source, one after the other. copies: they are copied, because they are
    mapped from a file.
    """
    tensors = HfTensors(source, model.config)
    for name, parameter in list(model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        tensor = tensors.get(name, parameter.dtype)
        if tensor.shape != parameter.shape:
            raise UserError(f"{name} has shape {list(tensor.shape)}, expected {list(parameter.shape)}")
        setattr(model.get_submodule(module), leaf, nn.Parameter(tensor.clone() if copies else tensor))
    for name in stored_buffers(model):
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, tensors.get(name, torch.float32).clone())


class HfTensors:
    """The tensors of a source, by the names of the class of `hf_config`."""

    def __init__(self, source: TensorSource, hf_config: PretrainedConfig) -> None:
        self._source, self._names = source, source.names()
        self._hf_config = hf_config

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        """Raises KeyError for a tensor that the model does not have."""
        if name in self._names or self._policy is None or name not in self._of_experts:
            return self._source.get(name, dtype)
        canonical, index = self._of_experts[name]
        policy, config = self._policy, self._policy.model_config(self._hf_config)

        def get(stored: str, cut: Cut | None) -> Tensor:
            return self._source.get(stored, dtype, cut)

        tensor = policy.as_stored(config, self._names).tensor(shard(config), canonical, index, get)
        return policy.stored(config, canonical, tensor, index)[name].contiguous()

    @cached_property
    def _policy(self) -> Policy | None:
        policy = known_policy(self._hf_config)
        return policy if policy is not None and policy.experts is not None else None

    @cached_property
    def _of_experts(self) -> dict[str, tuple[str, int]]:
        """The canonical weight and the layer of each tensor of experts."""
        assert isinstance(self._policy, Policy)
        config = self._policy.model_config(self._hf_config)
        layers = filter(config.has_experts, range(config.num_layers))
        names = [name for name in config.layer_shapes() if name.split(".")[0] in OF_EXPERTS]
        places = [(name, index) for index in layers for name in names]
        return {name: place for place in places for name in self._policy.stored_names(*place)}


class CheckpointTensors:
    """The tensors of a source by the names that `save_pretrained` gives them: it writes most experts each by itself."""

    def __init__(self, source: TensorSource, hf_config: PretrainedConfig, shapes: Shapes) -> None:
        """shapes: of the tensors of transformers' class, by name."""
        self._tensors, self._stack = HfTensors(source, hf_config), ("", dict[str, Tensor]())
        self.shapes: Shapes = {}
        self._stacks: dict[str, tuple[str, str, int]] = {}  # stack, canonical weight and layer of an expert's matrix
        self._classes: dict[str, str] = {}  # names in the class
        policy = find_policy(hf_config)
        if policy is None:
            self.shapes = shapes
            self._classes = dict(zip(shapes, shapes, strict=True))
            return
        self._config = config = policy.model_config(hf_config)
        self._policy = policy.in_checkpoint(config)
        stacks = _stacks(policy, self._policy, config)
        for name, shape in shapes.items():
            if name not in stacks:
                published = policy.published_name(name)
                self.shapes[published], self._classes[published] = shape, name
                continue
            for part in self._policy.stored_names(*stacks[name]):
                published = policy.published_name(part)
                self.shapes[published], self._classes[published] = _shape_of_one(stacks[name][0], config), part
                self._stacks[published] = name, *stacks[name]

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        if name not in self._stacks:
            return self._tensors.get(self._classes[name], dtype)
        stack, canonical, index = self._stacks[name]
        if self._stack[0] != stack:  # one is in memory at a time
            whole = self._tensors.get(stack, dtype).flatten(0, 1)
            self._stack = stack, self._policy.stored(self._config, canonical, whole, index)
        return self._stack[1][self._classes[name]].contiguous()


def _stacks(policy: Policy, published: Policy, config: ModelConfig) -> dict[str, tuple[str, int]]:
    """The canonical weight and the layer of each stack of experts that is published in parts."""
    if policy.experts is None or published.experts == policy.experts:
        return {}
    matrices = [f"{role}.weight" for role in OF_EXPERTS[:2]]
    layers = filter(config.has_experts, range(config.num_layers))
    places = [(canonical, index) for index in layers for canonical in matrices]
    return {policy.stored_names(*place)[0]: place for place in places}


def _shape_of_one(canonical: str, config: ModelConfig) -> tuple[int, int]:
    """The shape of an expert's gate, up or down projection."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return (inner, hidden) if canonical.startswith(OF_EXPERTS[0]) else (hidden, inner)
