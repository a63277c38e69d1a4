"""Engines of models without a row: transformers runs them, with parts on labkit's kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from labkit.engine.engine import InjectedEngine
from labkit.engine.injected.inject import inject
from labkit.engine.options import Options
from labkit.engine.resolve import own_dtype
from labkit.engine.without_row import refuse_what_needs_a_row
from labkit.kernels import build
from labkit.system.errors import UnsupportedError, UserError
from labkit.weights.source import ModelSource


def injected_engine(model: Any, options: Options, why: str) -> InjectedEngine:
    """Returns an engine of a model in memory, or of a source that transformers can load. Raises UserError for options
    that only a model with a row has.

    why: the model has no row.
    """
    require_model(model, why)
    refuse_what_needs_a_row(options, name_of(model))
    require_kernels()
    if isinstance(model, ModelSource):
        dtype, load = loading(model, options)
        return engine_of(load, dtype, options, why)
    check_memory(model)
    return engine_of(model, options.dtype or model.dtype, options, why, consume=options.consume_model)


def engine_of(
    model: PreTrainedModel | Callable[[], PreTrainedModel],
    dtype: torch.dtype,
    options: Options,
    why: str,
    *,
    consume: bool = False,
) -> InjectedEngine:
    """Returns the engine of a model, see `inject`."""
    injected = inject(model, dtype, options.quant, consume=consume)
    return InjectedEngine(injected.model, options, why, injected.summary(), dict(injected.left))


def name_of(model: Any) -> str:
    """Returns the name of a model in messages."""
    of_source = isinstance(model, ModelSource)
    return type(model.hf_config).__name__.removesuffix("Config") if of_source else type(model).__name__


def require_model(model: Any, why: str) -> None:
    """Raises UserError unless transformers' code can run the model. why: it has no row."""
    if not isinstance(model, ModelSource | PreTrainedModel):
        raise UserError(f"no row can be derived for this {name_of(model)} ({why}); pass the transformers model")


def require_kernels() -> None:
    """Raises BuildError if the C++ kernels can't be compiled here."""
    if reason := build.unavailable():
        raise build.BuildError(reason)


def loading(source: ModelSource, options: Options) -> tuple[torch.dtype, Callable[[], PreTrainedModel]]:
    """Returns the type of the engine's matrices, and a function that loads the model for them."""
    own = own_dtype(source, source.hf_config)
    dtype = options.dtype or own
    return dtype, partial(source.hf_model, dtype if dtype.is_floating_point else own)


def check_memory(model: PreTrainedModel) -> None:
    """Raises UserError unless all weights are in the memory of the CPU."""
    name = name_of(model)
    for path, tensor in model.named_parameters():
        if tensor.is_meta:
            raise UserError(f"{path} of {name} has no memory (it is on the meta device); load the weights first")
        if tensor.device.type != "cpu":
            raise UnsupportedError(f"{name} has no row, and such models run on a CPU; got one on {tensor.device}")
