"""Second step of `init_inference`: all decisions. Nothing is read, joined or written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from labkit.engine.options import ExpertParallel
from labkit.engine.resolve import Request
from labkit.kernels import gpu
from labkit.kernels.types import float_dtype
from labkit.models.config import ModelConfig
from labkit.models.shards import evenly, shard
from labkit.system.errors import UnsupportedError, UserError
from labkit.weights.capacity import layers_bytes, outside_bytes
from labkit.weights.model_tensors import ModelTensors
from labkit.weights.spec import WeightSpec


@dataclass(frozen=True)
class Plan:
    """Decisions that the options leave open."""

    request: Request
    kv_dtype: torch.dtype  # of stored keys and values
    device: torch.device  # with several ranks each may join with another GPU
    stages: tuple[range, ...] | None  # layers of each pipeline stage; None: there is one stage

    @property
    def consumed(self) -> ModelTensors | None:
        """The passed model's tensors, if packing removes them from the model."""
        source = self.request.source
        return source if self.request.options.consume_model and isinstance(source, ModelTensors) else None


def make_plan(request: Request) -> Plan:
    """Returns the plan. Raises UserError for options that this machine or the kernels do not have."""
    options, spec, impl = request.options, request.spec, request.spec.impl
    kv_dtype = _stored_dtype(options.kv_dtype, spec.dtype)
    device = gpu.default_device() if impl == "triton" else gpu.CPU
    if device.type != "cuda" and (options.enable_cuda_graph or options.dependent_launch):
        raise UserError("enable_cuda_graph and dependent_launch need a GPU, and none is used; leave them out")
    if impl == "triton" and (missing := missing_in_triton(spec.config)):
        raise UnsupportedError(f"{missing}; pass impl='cpp'")
    _check_experts(options.moe, spec.config)
    if options.offload is not None:
        options.offload.check_for(impl)
    if options.kv_offload is not None:
        options.kv_offload.check_for(impl)
    if options.dependent_launch:
        gpu.require_dependent_launch()
    pipeline = options.pipeline_parallel
    stages = split_layers(spec, pipeline.stages, pipeline.layers) if pipeline.stages > 1 else None
    return Plan(request, kv_dtype, device, stages)


def missing_in_triton(config: ModelConfig) -> str | None:
    """What the Triton kernels lack for a model; None: nothing."""
    return "norms over all heads together are not in the Triton kernels yet" if config.qk_norm_whole else None


def _check_experts(moe: ExpertParallel, config: ModelConfig) -> None:
    """Raises UserError for other numbers of experts than the model's."""
    count = config.experts.count if config.experts else 1
    if moe.enabled and set(moe.moe_experts) - {1, count}:
        raise UserError(f"got moe_experts={moe.moe_experts}, expected [{count}] for {config.architecture}, or [1]")


def _stored_dtype(requested: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """Returns the type of stored keys and values, for matrices of `dtype`."""
    own = float_dtype(dtype)
    if requested not in (None, own, torch.int8):
        raise UserError(
            f"got kv_dtype={requested} with dtype={dtype}; expected None or {own}, which is the same, or int8"
        )
    return requested or own


def split_layers(spec: WeightSpec, stages: int, counts: Sequence[int] | None = None) -> tuple[range, ...]:
    """Consecutive layers for each stage. counts: their numbers; None: balanced by the bytes of weights per step, which
    include the LM head, but not the embedding, because a step reads only a few of its rows.

    Raises UserError for more stages than layers, and for `counts` that do not add up to the model's layers.
    """
    layers = spec.config.num_layers
    if stages > layers:
        raise UserError(f"pp_size={stages} stages for {layers} layers; use pp_size <= {layers}")
    if counts is not None and (sum(counts) != layers or min(counts) < 1):
        raise UserError(
            f"pipeline_parallel: layers={list(counts)} are {sum(counts)} layers, the model has {layers}; expected "
            f"{stages} numbers from 1 on that add up to {layers}"
        )
    counts = _balanced(spec, stages) if counts is None else counts
    return _ranges(counts)


def _ranges(counts: Iterable[int]) -> tuple[range, ...]:
    """Consecutive layers. counts: their number in each stage."""
    return tuple(range(begin, end) for begin, end in pairwise(accumulate(counts, initial=0)))


def _balanced(spec: WeightSpec, stages: int) -> list[int]:
    """Numbers of layers: the stage with the most bytes gets as few as possible, then the other stages are balanced."""
    config = spec.config
    if stages == 1:
        return [config.num_layers]
    sizes = [layers_bytes(spec, [layer]) for layer in range(config.num_layers)]
    ends = shard(config, layers=range(config.num_layers - 1, config.num_layers), embedding=False, head=True)
    head = outside_bytes(replace(spec, part=ends))

    def counts(in_last: int) -> list[int]:
        return [len(part) for part in evenly(config.num_layers - in_last, stages - 1)] + [in_last]

    def reads(in_last: int) -> list[int]:
        *before, last = (sum(sizes[stage.start : stage.stop]) for stage in _ranges(counts(in_last)))
        return sorted([*before, last + head], reverse=True)

    return counts(min(range(1, config.num_layers - stages + 2), key=reads))
