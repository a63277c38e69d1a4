"""The ladder that the fused engine is compared with, every rung and the engine itself behind one interface.

`hf-gemm` is vanilla with the engine's GEMM: what it gains over `hf-eager` is the GEMM's merit, the rest the fusion's.
Vanilla rungs run as fast as their library lets them: the attention that transformers picks (SDPA where it has one),
inference mode, and the same threads as the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, __version__
from transformers.pytorch_utils import Conv1D

from labkit.engine.annotate import annotate
from labkit.engine.engine import init_inference
from labkit.engine.stage_clock import StageTime
from labkit.kernels.build import unavailable
from labkit.kernels.gemm import gemm, packed
from labkit.kernels.types import Linear
from labkit.policies import policy_for
from labkit.presets import ModelSource

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FEW_ROWS = 64  # as many sequences as a decode step may have; most prompts have more
StageProbe = Callable[[Callable[[], object]], list[StageTime]]


def _no_stages(run: Callable[[], object]) -> list[StageTime]:
    return []


@dataclass(frozen=True)
class Baseline:
    """A model that is ready to generate. `impl` tells what really computes, `weights` how its matrices are stored."""

    name: str
    impl: str
    weights: torch.dtype
    model: Any
    tokenizer: Any
    stage_times: StageProbe = _no_stages  # the stages of one call; empty where they cannot be told apart
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """Hugging Face's `generate`."""
        with torch.inference_mode():
            return self.model.generate(input_ids, **self.options, **kwargs)


def baseline(name: str, source: ModelSource, dtype: torch.dtype, threads: int) -> Baseline:
    """Load `source` as the rung `name` of the ladder, for `threads` threads of this process."""
    check_baseline(name)
    torch.set_num_threads(threads)
    return BASELINES[name](name, source, dtype)


def check_baseline(name: str) -> None:
    """ValueError for an unknown name, or for one whose package is not installed."""
    if name not in BASELINES:
        raise ValueError(f"unknown baseline {name!r}; expected one of {', '.join(BASELINES)}")
    if name == "accelerate" and find_spec("accelerate") is None:
        raise ValueError("the baseline 'accelerate' needs a package that is not installed; pip install accelerate")


def _hf_eager(name: str, source: ModelSource, dtype: torch.dtype) -> Baseline:
    return _vanilla(name, "eager", source, source.hf_model(dtype))


def _hf_gemm(name: str, source: ModelSource, dtype: torch.dtype) -> Baseline:
    """Every linear of vanilla on packed weights, unfused. A prompt stays with torch, so the weights are held twice."""
    if reason := unavailable():
        raise ValueError(f"the baseline 'hf-gemm' runs labkit's C++ GEMM: {reason}")
    model = source.hf_model(dtype)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear | Conv1D):
            model.set_submodule(path, PackedLinear(module))
    return _vanilla(name, "eager with labkit's GEMM", source, model)


class PackedLinear(nn.Module):
    """A linear that multiplies a few rows (a decode step) with `labkit.kernels.gemm` and many with torch."""

    def __init__(self, original: nn.Linear | Conv1D) -> None:
        super().__init__()
        self.original = original
        weight = original.weight.T if isinstance(original, Conv1D) else original.weight
        self.outputs, inputs = weight.size(0), weight.size(1)
        bias = None if original.bias is None else original.bias.detach().float()
        self.packed = packed(Linear(weight.detach().contiguous(), bias, self.outputs, inputs, "rows"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        if len(rows) > FEW_ROWS:
            return self.original(x)
        y = gemm(rows.float().contiguous(), self.packed, threads=torch.get_num_threads(), impl="cpp")
        return y.to(x.dtype).view(*x.shape[:-1], self.outputs)


def _hf_compile(name: str, source: ModelSource, dtype: torch.dtype) -> Baseline:
    """Static cache and `torch.compile`; one graph for the prompt and one for a step, compiled by the first call."""
    model = source.hf_model(dtype)
    model.forward = torch.compile(model.forward)  # type: ignore[method-assign]
    impl = f"transformers {__version__}, torch.compile, static cache, {model.config._attn_implementation} attention"
    return Baseline(name, impl, dtype, model, source.tokenizer, options={"cache_implementation": "static"})


def _accelerate(name: str, source: ModelSource, dtype: torch.dtype) -> Baseline:
    import accelerate

    model = accelerate.dispatch_model(source.hf_model(dtype), {"": "cpu"}, force_hooks=True)
    return _vanilla(name, f"accelerate {accelerate.__version__}", source, model)


def _fused_int8(name: str, source: ModelSource, dtype: torch.dtype) -> Baseline:
    """The engine with int8 weights, LM head included, whatever `dtype` the others have."""
    return _fused(name, source, torch.int8, quant={"lm_head": True})


def _fused(name: str, source: ModelSource, dtype: torch.dtype, **options: Any) -> Baseline:
    engine = init_inference(source, dtype=dtype, replace_with_kernel_inject=True, **options)

    def stage_times(run: Callable[[], object]) -> list[StageTime]:
        engine.stage_times(reset=True)
        run()
        return engine.stage_times()

    reason = unavailable() if engine.impl == "reference" else None
    what = f"{engine.impl} kernels" + (", int8 weights" if dtype == torch.int8 else "")
    impl = f"labkit, {what}" + (f" ({reason.partition(':')[0]})" if reason else "")
    return Baseline(name, impl, dtype, engine, source.tokenizer, stage_times)


def _vanilla(name: str, how: str, source: ModelSource, model: PreTrainedModel) -> Baseline:
    def stage_times(run: Callable[[], object]) -> list[StageTime]:
        with annotate(model, policy_for(model.config)) as clock:
            run()
        return clock.stage_times()

    impl = f"transformers {__version__}, {how}, {model.config._attn_implementation} attention"
    return Baseline(name, impl, model.dtype, model, source.tokenizer, stage_times)


BASELINES: dict[str, Callable[[str, ModelSource, torch.dtype], Baseline]] = {
    "hf-eager": _hf_eager,
    "hf-gemm": _hf_gemm,
    "hf-compile": _hf_compile,
    "accelerate": _accelerate,
    "fused": _fused,
    "fused-int8": _fused_int8,
}
