"""The baselines of the fused engine, and the engine itself, with one interface.

`hf-gemm` is vanilla with the engine's GEMM. Its gain over `hf-eager` is due to the GEMM, and the engine's gain over it
is due to fusion. On a GPU `hf-graph` has a similar role: it does not launch kernels one by one, so the engine's gain
over it is due to the kernels themselves.
Vanilla baselines run as fast as their library lets them: with the attention that transformers picks (SDPA where it is
available), in inference mode, and on the same threads or the same GPU as the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, __version__
from transformers.pytorch_utils import Conv1D

from labkit.engine.plan import init_inference
from labkit.engine.runners.stage_clock import StageTime
from labkit.engine.vanilla.annotate import annotate
from labkit.engine.vanilla.hf_graph import GraphedModel, check_static_cache
from labkit.harness.compare.stage_spans import SpanClock
from labkit.harness.stored_weights import StoredWeights, Weights, stored_by
from labkit.kernels import gpu
from labkit.kernels.build import load, unavailable
from labkit.kernels.checks import unchecked
from labkit.kernels.gemm import gemm, packed
from labkit.kernels.gpu import CPU
from labkit.kernels.layer_stream import LayerStream
from labkit.kernels.types import Linear
from labkit.models.policies import find_policy
from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean
from labkit.weights.build import has_codes
from labkit.weights.precision import STORED, precision_of
from labkit.weights.source import ModelSource

FEW_ROWS = 64  # the most sequences of a decode step; most prompts have more tokens
WITHOUT_KERNELS = ("hf-eager", "hf-static", "hf-compile", "hf-graph", "accelerate")  # these run any architecture
FUSED_STORED = "fused-stored"
IN_PRECISION = "fused:"  # prefix of the engine in any precision, whose name follows
QUANTISED = {  # the engine with integer weights: precision by side
    "fused-int8": "int8+head",
    "fused-int4": "int4+head",
    "fused-int4-64": "int4-64+head",
    "fused-int4-128": "int4-128+head",
    FUSED_STORED: STORED,
}
StageProbe = Callable[[Callable[[], object]], list[StageTime]]


def _no_stages(run: Callable[[], object]) -> list[StageTime]:
    run()
    return []


@dataclass(frozen=True)
class Baseline:
    """A model that is ready to generate."""

    name: str
    impl: str  # libraries and kernels, in words
    weights: Weights  # stored type of the matrices
    model: Any
    tokenizer: Any
    stage_times: StageProbe = _no_stages  # makes a call and returns its stages; none where they cannot be timed
    options: Mapping[str, Any] = field(default_factory=dict)  # of `generate`
    inputs_on: torch.device | None = None  # device of the inputs, if it differs from that of the weights
    stamps_ns: Callable[[], list[int]] | None = None  # for `timed_generate`, where a streamer would change the timing

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        own: torch.device = getattr(self.model, "device", CPU)
        return self.inputs_on or own

    @property
    def streamed_bytes(self) -> int:
        """Bytes that a decode step of the engine reads from the disk; 0 for other models."""
        streamed = getattr(self.model, "streamed", None)
        return 0 if streamed is None else streamed.bytes_per_step

    @property
    def graph_nodes(self) -> tuple[tuple[str, str], ...]:
        """Kernel and stage of each node of the CUDA graph of the engine's latest step; empty for other models."""
        return tuple((node.kernel, node.stage) for node in getattr(self.model, "graph_nodes", ()))

    @property
    def reading(self) -> str:
        """How decode steps of the engine on a CPU read the weights, and how often that changed; empty for others."""
        return getattr(self.model, "reading", "")

    def rest(self) -> None:
        """Waits until no layer is read ahead for a next step, because that would disturb a probe of the disk."""
        streamed = getattr(self.model, "streamed", None)
        if streamed is not None and isinstance(streamed.stream, LayerStream):
            streamed.stream.rest()

    def greedy_arguments(self, batch: int, prompt: int) -> dict[str, Any]:
        """Arguments of `generate`, except the number of new tokens, for `batch` prompts without padding. From now on an
        end-of-text token does not end a generation.
        """
        if (settings := getattr(self.model, "generation_config", None)) is not None:
            settings.eos_token_id = None  # so that no processor has to forbid an early end
        pad = self.config.pad_token_id
        return {
            "attention_mask": torch.ones((batch, prompt), dtype=torch.long),
            "do_sample": False,
            "num_beams": 1,
            "pad_token_id": 0 if pad is None else pad,
        }

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """Hugging Face's `generate`. Tensors may be on any device; the result is on the model's device."""
        moved = {key: value.to(self.device) if torch.is_tensor(value) else value for key, value in kwargs.items()}
        with torch.inference_mode():
            return self.model.generate(input_ids.to(self.device), **self.options, **moved)


def comparison_device() -> torch.device:
    """Device of all sides of a comparison: the current GPU, or the CPU of a machine without a GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def baseline(name: str, source: ModelSource, dtype: torch.dtype, threads: int, **options: Any) -> Baseline:
    """Loads `source` as the baseline `name`, to run on `threads` threads of this process or on its GPU.

    `options` are options of `init_inference`, for the engine's baselines.

    UserError as from `check_baseline`, and for a model that the baseline cannot run.
    """
    check_baseline(name)
    torch.set_num_threads(threads)
    make = _in_precision if name.startswith(IN_PRECISION) else BASELINES[name]
    return make(name, source, dtype, **options)


def check_baseline(name: str, *, others: Iterable[str] = ()) -> None:
    """As `check_name`. Also UserError where the baseline's package is missing, or it runs only on another device."""
    check_name(name, others=others)
    if name == "accelerate" and find_spec("accelerate") is None:
        raise UserError("the baseline 'accelerate' needs a package that is not installed; pip install accelerate")
    on_gpu = torch.cuda.is_available()
    if name == "hf-graph" and not on_gpu:
        raise UserError(
            "the baseline 'hf-graph' got no GPU, expected an NVIDIA GPU and PyTorch's CUDA build; use hf-static"
        )
    if name == "hf-gemm" and on_gpu:
        raise UserError(
            "the baseline 'hf-gemm' got a GPU, expected none: it runs labkit's C++ GEMM; use hf-graph, or hide the GPU "
            "with CUDA_VISIBLE_DEVICES=-1"
        )
    if name.startswith("fused") and on_gpu and (reason := gpu.unavailable()):
        raise UserError(f"the baseline {name!r} would not run on the GPU, where the others do: {reason}")


def load_kernels(name: str, dtype: torch.dtype) -> None:
    """Compiles and loads the C++ kernels of the engine's side `name`, if they run on this machine. Does nothing for
    other sides.
    """
    if name.startswith("fused") and comparison_device().type == "cpu" and not unavailable():
        precision_dtype = (
            None if name == "fused" else precision_of(QUANTISED.get(name) or name.removeprefix(IN_PRECISION)).dtype
        )
        load(str(precision_dtype or dtype).removeprefix("torch."))


def check_name(name: str, *, others: Iterable[str] = ()) -> None:
    """UserError for an unknown name or precision.

    `others`: further sides, which the error lists as well.
    """
    if name.startswith(IN_PRECISION):
        precision_of(name.removeprefix(IN_PRECISION))
    elif name not in BASELINES:
        known = (*BASELINES, *others)
        raise UserError(
            f"unknown side {name!r}{did_you_mean(name, known)}; expected one of {', '.join(known)}, or "
            f"{IN_PRECISION}int4-64 and the like"
        )


def _hf_eager(name: str, source: ModelSource, dtype: torch.dtype) -> Baseline:
    return vanilla(name, "eager", source, _hf_model(source, dtype))


def _hf_static(name: str, source: ModelSource, dtype: torch.dtype) -> Baseline:
    """Static cache, not compiled: `disable_compile` keeps transformers from compiling the steps on a GPU."""
    model = _hf_model(source, dtype)
    check_static_cache(model)
    options = {"cache_implementation": "static", "disable_compile": True}
    return vanilla(name, "eager, static cache", source, model, options)


def _hf_graph(name: str, source: ModelSource, dtype: torch.dtype) -> Baseline:
    model = GraphedModel(_hf_model(source, dtype))
    impl = f"transformers {__version__}, CUDA graph, static cache, {model.config._attn_implementation} attention"
    return Baseline(name, impl, dtype, model, source.tokenizer)


def _hf_gemm(name: str, source: ModelSource, dtype: torch.dtype) -> Baseline:
    """Vanilla with all linears on packed weights, unfused. Torch multiplies the prompt, so memory holds the weights
    twice.
    """
    if reason := unavailable():
        raise UserError(f"the baseline 'hf-gemm' runs labkit's C++ GEMM: {reason}")
    model = source.hf_model(dtype)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear | Conv1D):
            model.set_submodule(path, PackedLinear(module))
    return vanilla(name, "eager with labkit's GEMM", source, model)


class PackedLinear(nn.Module):
    """A linear that multiplies few rows (a decode step) with `labkit.kernels.gemm`, and many rows with torch."""

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
        y = unchecked(gemm)(rows.float().contiguous(), self.packed, threads=torch.get_num_threads(), impl="cpp")
        return y.to(x.dtype).view(*x.shape[:-1], self.outputs)


def _hf_compile(name: str, source: ModelSource, dtype: torch.dtype) -> Baseline:
    """Static cache and `torch.compile`. The first call compiles one graph for the prompt and one for a step.

    On a GPU transformers itself compiles only the steps, with CUDA graphs ("reduce-overhead").
    """
    model = _hf_model(source, dtype)
    way = "torch.compile"
    if model.device.type == "cuda":
        way += " (reduce-overhead)"
    else:
        model.forward = torch.compile(model.forward)  # type: ignore[method-assign]
    impl = f"transformers {__version__}, {way}, static cache, {model.config._attn_implementation} attention"
    return Baseline(name, impl, dtype, model, source.tokenizer, options={"cache_implementation": "static"})


def _accelerate(name: str, source: ModelSource, dtype: torch.dtype) -> Baseline:
    import accelerate

    model = accelerate.dispatch_model(source.hf_model(dtype), {"": str(comparison_device())}, force_hooks=True)
    return vanilla(name, f"accelerate {accelerate.__version__}", source, model)


def _in_precision(name: str, source: ModelSource, dtype: torch.dtype, **options: Any) -> Baseline:
    """The engine in a precision of its own, independent of the `dtype` of the other sides."""
    if name == FUSED_STORED and not has_codes(source):
        raise UserError(f"got {source.name} for {name!r}, expected a model whose file holds codes, as a GGUF file may")
    precision = precision_of(QUANTISED.get(name) or name.removeprefix(IN_PRECISION))
    return _fused(name, source, precision.dtype, **({"quant": precision.quant} if precision.quant else {}), **options)


def _fused(name: str, source: ModelSource, dtype: torch.dtype | None, **options: Any) -> Baseline:
    engine = init_inference(source, dtype=dtype, replace_with_kernel_inject=True, **options)

    spans = SpanClock(engine.pipeline) if engine.pipeline else None

    def stage_times(run: Callable[[], object]) -> list[StageTime]:
        engine.stage_times(reset=True)
        run()
        return engine.stage_times() + (spans.beside_layers() if spans else [])

    reason = unavailable() if engine.impl == "reference" else None
    weights = stored_by(engine)
    kernels = f"{engine.impl} kernels" + (f", {weights} weights" if isinstance(weights, StoredWeights) else "")
    impl = f"labkit, {kernels}" + (f" ({reason.partition(':')[0]})" if reason else "")
    stamps = spans.stamps_ns if spans else None
    return Baseline(name, impl, weights, engine, source.tokenizer, stage_times, stamps_ns=stamps)


def _hf_model(source: ModelSource, dtype: torch.dtype) -> PreTrainedModel:
    return source.hf_model(dtype).to(comparison_device())


def vanilla(
    name: str, way: str, source: ModelSource, model: PreTrainedModel, options: Mapping[str, Any] | None = None
) -> Baseline:
    """A model that transformers runs. `way`: how it runs, in words. `options`: options of its `generate`."""

    policy = find_policy(model.config)

    def stage_times(run: Callable[[], object]) -> list[StageTime]:
        if policy is None:
            return _no_stages(run)
        with annotate(model, policy) as clock:
            run()
        on_cpu = model.device.type == "cpu"  # on a GPU the CPU would time launches
        return clock.stage_times() if on_cpu else []

    impl = f"transformers {__version__}, {way}, {model.config._attn_implementation} attention"
    return Baseline(name, impl, model.dtype, model, source.tokenizer, stage_times, options or {})


BASELINES: dict[str, Callable[..., Baseline]] = {
    "hf-eager": _hf_eager,
    "hf-gemm": _hf_gemm,
    "hf-static": _hf_static,
    "hf-compile": _hf_compile,
    "hf-graph": _hf_graph,
    "accelerate": _accelerate,
    "fused": _fused,
    **dict.fromkeys(QUANTISED, _in_precision),
}
