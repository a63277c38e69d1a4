"""Runners of ranges of a small model's layers."""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.slots import SlotPool
from labkit.engine.runners.layer_range import LayerRange
from labkit.engine.runners.one_call import OneCallRunner
from labkit.engine.runners.runner import Runner
from labkit.engine.runners.staged import StagedRunner
from labkit.engine.runners.step import StepInput, StepOutput
from labkit.kernels import gpu
from labkit.models.shards import shard
from labkit.weights.build import build_weights
from labkit.weights.model_tensors import ModelTensors
from labkit.weights.spec import WeightSpec


def runner_of(model: PreTrainedModel, layers: range, impl: str, *, graphs: bool = False) -> Runner:
    """Runner on the GPU with impl="triton", if there is a GPU. graphs: decode steps are captured and replayed."""
    device = gpu.default_device() if impl == "triton" else gpu.CPU
    whole = WeightSpec.of(model.config, torch.float32, impl)
    spec = replace(whole, part=shard(whole.config, layers=layers))
    weights = build_weights(spec, ModelTensors(model), device)
    assert (weights.embedding is None, weights.head is None) == (layers.start > 0, layers.stop < spec.config.num_layers)
    pool = SlotPool(spec.part.local, torch.float32, device) if impl == "triton" else None
    layer_range = LayerRange(spec, weights, device, pool=pool)
    if impl == "cpp":
        return OneCallRunner(layer_range)
    staged = StagedRunner(layer_range)
    if impl == "reference":
        return staged
    from labkit.engine.runners.cuda_graph import CudaGraphRunner, GpuDecoder

    launch = replace(gpu.default_launcher(), launched=[])
    return CudaGraphRunner(staged, GpuDecoder(weights, launch, device, graphs=graphs))


class CutModel:
    """A model in consecutive ranges of layers. `ends` are the borders of the ranges, with 0 and the number of layers.

    A batch is continued with one cache per range.
    """

    def __init__(self, model: PreTrainedModel, ends: tuple[int, ...], impl: str, *, graphs: bool = False) -> None:
        self.runners = [runner_of(model, range(*layers), impl, graphs=graphs) for layers in pairwise(ends)]

    def new_caches(self, capacity: int = 0) -> list[KVCache]:
        return [runner.layer_range.new_cache(capacity) for runner in self.runners]

    def step(self, step: StepInput, caches: list[KVCache]) -> StepOutput:
        """Output of a step of the whole model. The cache in `step` is ignored."""
        rows: Tensor | None = None
        for runner, cache in zip(self.runners, caches, strict=True):
            part = step._replace(cache=cache, rows=rows, tokens=step.tokens if rows is None else None)
            output = runner.begin(part).collect()
            assert (output.result is None) == (runner is not self.runners[-1])
            rows = output.rows
        return output
