"""Engines of models without a row: transformers runs them, with parts on labkit's kernels."""

from __future__ import annotations

from transformers import PreTrainedModel

from labkit.engine.engine import InjectedEngine
from labkit.engine.injected.inject import inject
from labkit.engine.options import Options
from labkit.engine.without_kernels import refuse_checkpoints
from labkit.kernels import build
from labkit.system.errors import UnsupportedError, UserError


def injected_engine(model: PreTrainedModel, options: Options, why: str) -> InjectedEngine:
    """Returns an engine of a model in memory. Raises UserError for options that only a model with a row has.

    why: the model has no row.
    """
    name = type(model).__name__
    _refuse_what_needs_a_row(options, name)
    if reason := build.unavailable():
        raise build.BuildError(reason)
    for path, tensor in model.named_parameters():
        if tensor.is_meta:
            raise UserError(f"{path} of {name} has no memory (it is on the meta device); load the weights first")
        if tensor.device.type != "cpu":
            raise UnsupportedError(f"{name} has no row, and such models run on a CPU; got one on {tensor.device}")
    injected = inject(model, options.dtype or model.dtype, options.quant, consume=options.consume_model)
    return InjectedEngine(injected.model, options, why, injected.summary(), dict(injected.left))


def _refuse_what_needs_a_row(options: Options, model: str) -> None:
    """Raises UserError for options of the fused decode step and its cache."""
    refuse_checkpoints(options, model)
    if options.pipeline_parallel.stages > 1:
        raise UserError(f"pipeline_parallel needs a row, and {model} has none; leave it out")
    for name in ("offload", "kv_offload", "kv_dtype"):
        if getattr(options, name) is not None:
            raise UserError(f"{name} needs a row, and {model} has none; leave it out")
    if options.quant.flat is not None:
        raise UserError(f"quantization_setting needs a row, and {model} has none; use quant")
    if options.impl not in ("auto", "cpp") or options.use_triton or options.enable_cuda_graph:
        raise UserError(
            f"{model} has no row, and such models run on the C++ kernels; leave impl, use_triton and "
            "enable_cuda_graph out"
        )
