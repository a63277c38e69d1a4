"""Second step of `init_inference`: all decisions. Nothing is read, joined or written."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labkit.engine.resolve import Request
from labkit.kernels import gpu
from labkit.kernels.types import float_dtype
from labkit.system.errors import UserError
from labkit.weights.layer_split import split_layers
from labkit.weights.model_tensors import ModelTensors


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
    if options.offload is not None:
        options.offload.check_for(impl)
    if options.kv_offload is not None:
        options.kv_offload.check_for(impl)
    if options.dependent_launch:
        gpu.require_dependent_launch()
    pipeline = options.pipeline_parallel
    stages = split_layers(spec, pipeline.stages, pipeline.layers) if pipeline.stages > 1 else None
    return Plan(request, kv_dtype, device, stages)


def _stored_dtype(requested: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """Returns the type of stored keys and values, for matrices of `dtype`."""
    own = float_dtype(dtype)
    if requested not in (None, own, torch.int8):
        raise UserError(
            f"got kv_dtype={requested} with dtype={dtype}; expected None or {own}, which is the same, or int8"
        )
    return requested or own
