"""The engines that `init_inference` returns, behind DeepSpeed's interface: fused models, and models cut over ranks."""

from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from labkit.engine.hf.causal_lm import FusedCausalLM
from labkit.engine.hf.encoder import FusedEncoder
from labkit.engine.options import Options
from labkit.engine.runners.stage_clock import StageClock, StageTime
from labkit.models.config import ModelConfig
from labkit.system.errors import UserTypeError

if TYPE_CHECKING:
    from labkit.engine.runners.cuda_graph import Node


class InferenceEngine(nn.Module):
    """A fused model behind DeepSpeed's engine interface and Hugging Face's model attributes.

    `module` is the fused model. The engine can stand in for the original one, as in `pipe.model = engine`.
    """

    def __init__(self, module: FusedCausalLM, options: Options) -> None:
        super().__init__()
        self.module, self.options = module, options

    @property
    def fused(self) -> FusedCausalLM | FusedEncoder:
        """What runs on the kernels: the whole module, or the layers of an encoder."""
        return self.module

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
    def model_config(self) -> ModelConfig:
        return self.fused.model_config

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype

    @property
    def impl(self) -> str:
        """ "triton", "cpp" or "reference": what "auto" became."""
        return self.fused.impl

    @property
    def graph_nodes(self) -> "tuple[Node, ...]":
        """The kernels of the latest decode step on a GPU, in the order of its CUDA graph, each with its stage."""
        return self.fused.gpu.nodes if self.fused.gpu else ()

    def can_generate(self) -> bool:
        return True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; see FusedCausalLM.forward."""
        return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's generate on the fused model: same arguments, same results."""
        return self.module.generate(*args, **kwargs)

    def profile_model_time(self) -> None:
        """Starts recording the wall time of every model step, also those of `generate` (as DeepSpeed does)."""
        self.fused.step_times_ms = []

    def model_times(self) -> list[float]:
        """Milliseconds of each model step since the last call. Raises RuntimeError before `profile_model_time`."""
        times = self.fused.step_times_ms
        if times is None:
            raise RuntimeError("model times are not recorded; call profile_model_time() first")
        self.fused.step_times_ms = []
        return times

    def stage_times(self, *, reset: bool = True) -> list[StageTime]:
        """Wall time by phase, layer and stage, summed over the steps since the last reset. Collected by the one-call
        C++ step at no cost; empty for the reference and for steps that ran under a profiler.
        """
        times = self.fused.clock.times()
        if reset:
            self.fused.clock.reset()
        return times

    def destroy(self) -> None:
        """Frees the weights. Every later use of the engine raises RuntimeError."""
        del self.module

    def __getattr__(self, name: str) -> Any:
        """Whatever else callers look for on a transformers model is the fused module's."""
        if name != "module":
            return getattr(self.module, name)
        if "module" in self._modules:
            return self._modules["module"]
        raise RuntimeError("this engine was destroyed; call init_inference again for a new one")


class EncoderEngine(InferenceEngine):
    """An encoder. `module` is transformers' own model, with a FusedEncoder where its layers stood."""

    module: Any

    def __init__(self, module: PreTrainedModel, options: Options, encoder: str) -> None:
        super().__init__(module, options)
        self._encoder = encoder

    @property
    def fused(self) -> FusedEncoder:
        return getattr(self.module.base_model, self._encoder)

    def can_generate(self) -> bool:
        return False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise UserTypeError(f"{type(self.module).__name__} is an encoder and generates no text; call the engine itself")


class SlicedEngine(InferenceEngine):
    """A model that has no kernels, its linears cut over ranks (`labkit.engine.parallel.slicing`). `module` is
    transformers' own.

    It runs torch's ops, announces no stages, and every rank calls it with the same arguments.
    """

    module: Any
    impl = "torch"
    gpu = None

    def __init__(self, module: PreTrainedModel, options: Options) -> None:
        super().__init__(module, options)
        self.clock = StageClock(0, ())
        self.step_times_ms: list[float] | None = None
        self._started = 0.0
        module.register_forward_pre_hook(self._begin_step)
        module.register_forward_hook(self._end_step)

    @property
    def fused(self) -> Any:
        """Nothing of it is; what is recorded of its steps is recorded here."""
        return self

    @property
    def model_config(self) -> ModelConfig:
        raise AttributeError(f"{type(self.module).__name__} has no kernel policy; its config is engine.config")

    def can_generate(self) -> bool:
        return bool(self.module.can_generate())

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's generate; all ranks draw the random numbers that the first one draws."""
        if self.options.tensor_parallel.ranks > 1:
            state = torch.get_rng_state()
            dist.broadcast(state, group_src=0, group=self.options.tensor_parallel.tp_group)
            torch.set_rng_state(state)
        return self.module.generate(*args, **kwargs)

    def _begin_step(self, *call: Any) -> None:
        self._started = perf_counter()

    def _end_step(self, *call: Any) -> None:
        if self.step_times_ms is not None:
            self.step_times_ms.append((perf_counter() - self._started) * 1e3)
