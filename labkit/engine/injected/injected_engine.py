"""Engines of models without a row: transformers runs them, with parts on labkit's kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import PreTrainedModel

from labkit.engine.engine import InjectedEngine
from labkit.engine.injected.inject import Injected, inject
from labkit.engine.options import Options
from labkit.engine.resolve import own_dtype
from labkit.engine.without_kernels import refuse_options_of_fused_steps
from labkit.kernels import build
from labkit.system.errors import UnsupportedError, UserError
from labkit.weights.source import ModelSource


def injected_engine(model: Any, options: Options, why: str) -> InjectedEngine:
    """Returns an engine of a model in memory, or of a source that transformers can load. Raises UserError for options
    that only a model with a row has.

    why: the model has no row.
    """
    if isinstance(model, ModelSource):
        _refuse_what_needs_a_row(options, type(model.hf_config).__name__.removesuffix("Config"))
        _require_kernels()
        dtype = options.dtype or own_dtype(model, model.hf_config)
        loaded = dtype if dtype.is_floating_point else own_dtype(model, model.hf_config)
        return _engine(inject(partial(model.hf_model, loaded), dtype, options.quant), options, why)
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"no row can be derived for this {type(model).__name__} ({why}); pass the transformers model")
    name = type(model).__name__
    _refuse_what_needs_a_row(options, name)
    _require_kernels()
    for path, tensor in model.named_parameters():
        if tensor.is_meta:
            raise UserError(f"{path} of {name} has no memory (it is on the meta device); load the weights first")
        if tensor.device.type != "cpu":
            raise UnsupportedError(f"{name} has no row, and such models run on a CPU; got one on {tensor.device}")
    injected = inject(model, options.dtype or model.dtype, options.quant, consume=options.consume_model)
    return _engine(injected, options, why)


def _engine(injected: Injected, options: Options, why: str) -> InjectedEngine:
    return InjectedEngine(injected.model, options, why, injected.summary(), dict(injected.left))


def _require_kernels() -> None:
    if reason := build.unavailable():
        raise build.BuildError(reason)


def _refuse_what_needs_a_row(options: Options, model: str) -> None:
    """Raises UserError for options of the fused decode step and its cache."""
    refuse_options_of_fused_steps(options, model, f"needs a row, and {model} has none", pipeline="leave it out")
    if options.quant.flat is not None:
        raise UserError(f"quantization_setting needs a row, and {model} has none; use quant")
    if options.impl not in ("auto", "cpp") or options.use_triton or options.enable_cuda_graph:
        raise UserError(
            f"{model} has no row, and such models run on the C++ kernels; leave impl, use_triton and "
            "enable_cuda_graph out"
        )
