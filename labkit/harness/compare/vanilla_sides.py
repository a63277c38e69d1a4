"""Loaders of the sides that transformers runs with the weights in memory.

`hf-gemm` is vanilla with the engine's GEMM. Its gain over `hf-eager` is due to the GEMM, and the engine's gain over it
is due to fusion. On a GPU `hf-graph` has a similar role: it does not launch kernels one by one, so the engine's gain
over it is due to the kernels themselves.
Vanilla sides run as fast as their library lets them: with the attention that transformers picks (SDPA where it is
available), in inference mode, and on the same threads or the same GPU as the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, __version__
from transformers.pytorch_utils import Conv1D

from labkit.engine.injected.modules import InjectedLinear
from labkit.engine.injected.part_packer import PartPacker
from labkit.engine.runners.stage_clock import StageTime
from labkit.engine.vanilla.annotate import annotate
from labkit.engine.vanilla.hf_graph import GraphedModel, check_static_cache
from labkit.harness.compare.loaded_side import LoadedSide, StageProbe, comparison_device
from labkit.harness.compare.loader import MemoryLoader
from labkit.kernels.build import unavailable
from labkit.models.observed.calls import matrix
from labkit.models.policies import known_policy
from labkit.models.policy import Policy
from labkit.system.errors import UserError
from labkit.weights.quantise import Quantization
from labkit.weights.source import ModelSource


def vanilla(
    name: str, way: str, source: ModelSource, model: PreTrainedModel, options: Mapping[str, Any] | None = None
) -> LoadedSide:
    """A model that transformers runs. `way`: how it runs, in words. `options`: options of its `generate`."""

    policy = known_policy(model.config)
    return LoadedSide(
        name, impl_of(way, model), model.dtype, model, source.tokenizer, hooked_stages(model, policy), options or {}
    )


def hooked_stages(model: PreTrainedModel, policy: Policy | None) -> StageProbe:
    """The stages of a model that transformers runs, by its row, or by the structure of its layers without one."""

    def stage_times(run: Callable[[], object]) -> list[StageTime]:
        with annotate(model, policy) as clock:
            run()
        on_cpu = model.device.type == "cpu"  # on a GPU the CPU would time launches
        return clock.stage_times() if on_cpu else []

    return stage_times


def impl_of(way: str, model: Any) -> str:
    """The implementation of a model that transformers runs, in words. `way`: how it runs."""
    return f"transformers {__version__}, {way}, {model.config._attn_implementation} attention"


def _hf_model(source: ModelSource, dtype: torch.dtype) -> PreTrainedModel:
    return source.hf_model(dtype).to(comparison_device())


class Eager(MemoryLoader):
    """Each op is a call from Python."""

    def load(self, side: str, source: ModelSource, dtype: torch.dtype, options: Mapping[str, Any]) -> LoadedSide:
        return vanilla(side, "eager", source, _hf_model(source, dtype))


class StaticCache(MemoryLoader):
    """Static cache, not compiled: `disable_compile` keeps transformers from compiling the steps on a GPU."""

    def load(self, side: str, source: ModelSource, dtype: torch.dtype, options: Mapping[str, Any]) -> LoadedSide:
        model = _hf_model(source, dtype)
        check_static_cache(model)
        cache = {"cache_implementation": "static", "disable_compile": True}
        return vanilla(side, "eager, static cache", source, model, cache)


class Graphed(MemoryLoader):
    """A decode step is a CUDA graph."""

    def load(self, side: str, source: ModelSource, dtype: torch.dtype, options: Mapping[str, Any]) -> LoadedSide:
        model = GraphedModel(_hf_model(source, dtype))
        return LoadedSide(side, impl_of("CUDA graph, static cache", model), dtype, model, source.tokenizer)


class Gemm(MemoryLoader):
    """Each linear on packed weights, unfused."""

    def check(self, side: str, *, dtype: str, batch: int) -> None:
        if reason := unavailable():
            raise UserError(f"the side {side!r} runs labkit's C++ GEMM: {reason}")

    def load(self, side: str, source: ModelSource, dtype: torch.dtype, options: Mapping[str, Any]) -> LoadedSide:
        model = source.hf_model(dtype)
        linears = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
        packer = PartPacker(
            dtype, Quantization(), [(len(rows), rows.shape[1]) for rows in map(matrix, linears.values())]
        )
        while linears:
            path, linear = linears.popitem()
            model.set_submodule(path, InjectedLinear(packer.linears([linear]), dtype))
        return vanilla(side, "eager with labkit's GEMM", source, model)


class Compiled(MemoryLoader):
    """Static cache and `torch.compile`. The first call compiles one graph for the prompt and one for a step.

    On a GPU transformers itself compiles only the steps, with CUDA graphs ("reduce-overhead").
    """

    def load(self, side: str, source: ModelSource, dtype: torch.dtype, options: Mapping[str, Any]) -> LoadedSide:
        model = _hf_model(source, dtype)
        way = "torch.compile"
        if model.device.type == "cuda":
            way += " (reduce-overhead)"
        else:
            model.forward = torch.compile(model.forward)  # type: ignore[method-assign]
        impl = impl_of(f"{way}, static cache", model)
        return LoadedSide(side, impl, dtype, model, source.tokenizer, options={"cache_implementation": "static"})


class Accelerate(MemoryLoader):
    """accelerate's hooks around the modules, with all weights on one device."""

    def load(self, side: str, source: ModelSource, dtype: torch.dtype, options: Mapping[str, Any]) -> LoadedSide:
        import accelerate

        model = accelerate.dispatch_model(source.hf_model(dtype), {"": str(comparison_device())}, force_hooks=True)
        return vanilla(side, f"accelerate {accelerate.__version__}", source, model)
