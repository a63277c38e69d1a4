"""Engines, as returned by `init_inference`: models with DeepSpeed's engine interface and Hugging Face's attributes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Self

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from labkit.engine.hf.causal_lm import FusedCausalLM
from labkit.engine.hf.encoder import FusedEncoder
from labkit.engine.options import Options
from labkit.engine.parallel.pipeline_stage import PipelineStage
from labkit.engine.parallel.ranks import draw_alike
from labkit.engine.runners.one_call import OneCallRunner
from labkit.engine.runners.runner import Runner, RunnerInfo
from labkit.engine.runners.stage_clock import ExpertsRead, StageTime
from labkit.engine.runners.step import Node
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.decode_step.weights import ModelWeights
from labkit.kernels.expert_store import ExpertStore
from labkit.models.config import ModelConfig
from labkit.models.level_names import DERIVED, HOOKS, ROW, kernels_in_words
from labkit.models.policies import find_policy
from labkit.system.errors import RunError, UserError, UserTypeError


class InferenceEngine(nn.Module):
    """Engine around `module`, a transformers model or a fused model with the same interface. It can replace the
    original model, as in `pipe.model = engine`.

    options: of the call of `init_inference`.
    impl: "triton", "cpp" or "reference", as "auto" was resolved, or "torch" for a model without labkit's kernels.
    level: how much of the model runs on labkit's kernels. "row" and "derived row": all layers, in one call. "hooks":
    linears and MLPs, in transformers' code. "transformers": nothing.
    """

    impl: str
    level: str  # ROW, DERIVED, HOOKS or "transformers"
    module: Any

    def __init__(self, module: PreTrainedModel, options: Options) -> None:
        super().__init__()
        self.module, self.options = module, options

    @property
    def kernels(self) -> str:
        """The kernels and the level in words: "cpp kernels", "cpp kernels by a derived row", "cpp kernels in hooks"."""
        return kernels_in_words(self.impl, self.level)

    @property
    def config(self) -> PretrainedConfig:
        return self.module.config

    @property
    def generation_config(self) -> GenerationConfig:
        return self.module.generation_config

    @generation_config.setter
    def generation_config(self, value: GenerationConfig) -> None:
        self.module.generation_config = value

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype

    @property
    def runner_info(self) -> RunnerInfo:
        """How the steps run; for an engine without a runner, the defaults."""
        return RunnerInfo()

    @property
    def graph_nodes(self) -> tuple[Node, ...]:
        """The kernels of the latest decode step on a GPU, in the order of its CUDA graph, each with its stage."""
        return self.runner_info.nodes

    @property
    def reading(self) -> str:
        """How the latest decode steps read the weights, and the number of changes; empty if there is no choice."""
        return self.runner_info.reading

    @property
    def streamed(self) -> StreamedLayers | None:
        """The offloaded layers, which every step reads, with their stream; None: all layers are resident."""
        return self.runner_info.streamed

    @property
    def expert_store(self) -> ExpertStore | None:
        """The offloaded experts, which steps read by need, with the counts of their reads; None: all are resident, or
        offloaded with their layers.
        """
        return self.runner_info.expert_store

    @property
    def pipeline(self) -> PipelineStage | None:
        """The pipeline stage of this process, with its spans; None: it has all layers."""
        return self.runner_info.pipeline

    def can_generate(self) -> bool:
        return bool(self.module.can_generate())

    def extra_repr(self) -> str:
        return f"level={self.level}, impl={self.impl}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; see FusedCausalLM.forward."""
        return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's generate: same arguments, same results."""
        return self.module.generate(*args, **kwargs)

    def profile_model_time(self) -> None:
        """Starts recording the wall time of every model step, including steps of `generate` (as DeepSpeed does)."""
        raise NotImplementedError

    def model_times(self) -> list[float]:
        """Milliseconds of each model step since the last call. Raises RuntimeError before `profile_model_time`."""
        raise NotImplementedError

    def stage_times(self, *, reset: bool = True) -> list[StageTime]:
        """Returns wall times by phase, layer and stage, summed over the steps since the last reset. The one-call C++
        step collects them at no cost. Other runners, and steps under a profiler, collect none.
        """
        return []

    def destroy(self) -> None:
        """Frees the weights. Every later use of the engine raises RuntimeError, except `destroy`."""
        self._modules.pop("module", None)

    def __getattr__(self, name: str) -> Any:
        """Returns all other attributes from the module, as callers expect of a transformers model."""
        if name != "module":
            return getattr(self.module, name)
        if "module" in self._modules:
            return self._modules["module"]
        raise RunError("this engine was destroyed; call init_inference again for a new one")


class FusedEngine(InferenceEngine):
    """Engine of a model on the fused kernels."""

    level = ROW

    def __init__(self, module: PreTrainedModel, options: Options, impl: str) -> None:
        super().__init__(module, options)
        self.impl = impl

    @property
    def fused(self) -> FusedCausalLM | FusedEncoder:
        """The part that runs on the kernels: the whole module, or the layers of an encoder."""
        raise NotImplementedError

    @property
    def timed(self) -> Runner | FusedEncoder:
        """The part that measures times of steps and stages."""
        raise NotImplementedError

    @property
    def model_config(self) -> ModelConfig:
        return self.fused.model_config

    @property
    def weights(self) -> ModelWeights:
        """The packed weights of this process: with several ranks, this rank's part."""
        return self.fused.weights

    def profile_model_time(self) -> None:
        self.timed.step_times_ms = []

    def model_times(self) -> list[float]:
        times, self.timed.step_times_ms = _recorded(self.timed.step_times_ms), []
        return times

    def stage_times(self, *, reset: bool = True) -> list[StageTime]:
        clock = self.timed.clock
        times = clock.times()
        if reset:
            clock.reset()
        return times

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Applies `fn` to the packed weights first, so that they refuse a change before any other part has changed."""
        self.fused._apply(fn)
        return super()._apply(fn, recurse)


class DecoderEngine(FusedEngine):
    """Engine of a decoder. `module` is a FusedCausalLM."""

    def __init__(self, module: PreTrainedModel, options: Options, impl: str) -> None:
        super().__init__(module, options, impl)
        self.level = ROW if find_policy(module.config) else DERIVED

    @property
    def fused(self) -> FusedCausalLM:
        model: FusedCausalLM = self.module
        return model

    @property
    def timed(self) -> Runner:
        return self.fused.runner

    @property
    def runner_info(self) -> RunnerInfo:
        return self.fused.runner.info

    def experts_read(self) -> list[ExpertsRead]:
        """Returns how many experts the steps read, by phase, since `stage_times` was last reset. The one-call C++
        step counts them. Empty for a model without mixtures, and on a GPU.
        """
        return self.timed.clock.experts_read()

    @contextmanager
    def noting_experts(self) -> Iterator[list[torch.Tensor]]:
        """Context with a list to which every pass of the one-call C++ step appends the experts of its rows, int64
        [mixtures, rows, experts of a row]. A row is a token of a sequence; the tokens of a sequence follow each other.

        Raises UserError for a model without mixtures, and without the one-call step.
        """
        runner = getattr(self.timed, "fast", self.timed)
        if not isinstance(runner, OneCallRunner) or not self.weights.experts_of_a_row:
            raise UserError(
                f"got {type(self.module.config).__name__} with impl={self.impl!r}; expected a model with experts and "
                "impl='cpp', whose steps know them"
            )
        chosen: list[torch.Tensor] = []
        runner.chosen_experts = chosen
        try:
            yield chosen
        finally:
            runner.chosen_experts = None


class EncoderEngine(FusedEngine):
    """Engine of an encoder. `module` is transformers' own model, with a FusedEncoder instead of its layers."""

    def __init__(self, module: PreTrainedModel, options: Options, impl: str, encoder: str) -> None:
        """encoder: name of the FusedEncoder in the base model."""
        super().__init__(module, options, impl)
        self._encoder = encoder

    @property
    def fused(self) -> FusedEncoder:
        return getattr(self.module.base_model, self._encoder)

    @property
    def timed(self) -> FusedEncoder:
        return self.fused

    def can_generate(self) -> bool:
        return False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise UserTypeError(f"{type(self.module).__name__} is an encoder and generates no text; call the engine itself")


class HostedEngine(InferenceEngine):
    """Engine of a model that transformers runs. `module` is transformers' own, and announces no stages. If its linears
    are cut over ranks, every rank calls it with the same arguments.
    """

    def __init__(self, module: PreTrainedModel, options: Options) -> None:
        super().__init__(module, options)
        self._step_times_ms: list[float] | None = None
        self._started = 0.0
        module.register_forward_pre_hook(self._begin_step)
        module.register_forward_hook(self._end_step)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's generate. All ranks draw the same random numbers as rank 0."""
        tp = self.options.tensor_parallel

        def of_rank_0(state: torch.Tensor) -> torch.Tensor:
            torch.distributed.broadcast(state, group_src=0, group=tp.tp_group)
            return state

        if tp.ranks > 1:
            draw_alike(self.device, of_rank_0)
        return self.module.generate(*args, **kwargs)

    def profile_model_time(self) -> None:
        self._step_times_ms = []

    def model_times(self) -> list[float]:
        times, self._step_times_ms = _recorded(self._step_times_ms), []
        return times

    def _begin_step(self, *call: Any) -> None:
        self._started = self._now()

    def _end_step(self, *call: Any) -> None:
        if self._step_times_ms is not None:
            self._step_times_ms.append((self._now() - self._started) * 1e3)

    def _now(self) -> float:
        """The clock, in seconds, once a GPU has done its work so far, if steps are timed."""
        if self._step_times_ms is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()


class InjectedEngine(HostedEngine):
    """Engine of a model without a row, with parts on labkit's kernels (`labkit.engine.injected`).

    why: it has no row.
    replaced: what was replaced, in words.
    left: why other linears stayed transformers' own, by path.
    """

    impl, level = "cpp", HOOKS

    def __init__(
        self, module: PreTrainedModel, options: Options, why: str, replaced: list[str], left: dict[str, str]
    ) -> None:
        super().__init__(module, options)
        self.why, self.replaced, self.left = why, replaced, left


class SlicedEngine(HostedEngine):
    """Engine of a model without a row on GPUs, whose linears are cut over ranks (`labkit.engine.parallel.slicing`). It
    runs torch's ops.
    """

    impl, level = "torch", "transformers"


def _recorded(times: list[float] | None) -> list[float]:
    """Returns the times. Raises RunError if none are recorded."""
    if times is None:
        raise RunError("model times are not recorded; call profile_model_time() first")
    return times
