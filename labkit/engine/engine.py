"""`init_inference` and the engine that it returns."""

import copy
import json
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from labkit.config import ModelConfig
from labkit.engine.model import FusedCausalLM
from labkit.engine.options import DTYPES, Options, read_options
from labkit.engine.ranks import join_ranks
from labkit.engine.stage_clock import StageTime
from labkit.engine.weights import TensorSource, build_weights, check_weights
from labkit.kernels import build, gpu
from labkit.policies import policy_for
from labkit.shards import Cut, cut_of, shard

if TYPE_CHECKING:
    from labkit.engine.graph import Node


class InferenceEngine(nn.Module):
    """A fused model behind DeepSpeed's engine interface and Hugging Face's model attributes.

    `module` is the fused model. The engine can stand in for the original one, as in `pipe.model = engine`.
    """

    def __init__(self, module: FusedCausalLM, options: Options) -> None:
        super().__init__()
        self.module, self.options = module, options

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
        return self.module.model_config

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype

    @property
    def impl(self) -> str:
        """ "triton", "cpp" or "reference": what "auto" became."""
        return self.module.impl

    @property
    def graph_nodes(self) -> "tuple[Node, ...]":
        """The kernels of the latest decode step on a GPU, in the order of its CUDA graph, each with its stage."""
        return self.module.gpu.nodes if self.module.gpu else ()

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
        self.module.step_times_ms = []

    def model_times(self) -> list[float]:
        """Milliseconds of each model step since the last call. Raises RuntimeError before `profile_model_time`."""
        times = self.module.step_times_ms
        if times is None:
            raise RuntimeError("model times are not recorded; call profile_model_time() first")
        self.module.step_times_ms = []
        return times

    def stage_times(self, *, reset: bool = True) -> list[StageTime]:
        """Wall time by phase, layer and stage, summed over the steps since the last reset. Collected by the one-call
        C++ step at no cost; empty for the reference and for steps that ran under a profiler.
        """
        times = self.module.clock.times()
        if reset:
            self.module.clock.reset()
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


class ModelTensors:
    """The tensors of a model in memory; `release` empties a layer's parameters once they are packed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._tensors = model.state_dict()

    def names(self) -> set[str]:
        return set(self._tensors)

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor:
        tensor = cut_of(name, self._tensors[name].detach(), cut)
        return tensor if dtype is None else tensor.to(dtype)

    def release(self, prefix: str) -> None:
        parameters = dict(self.model.named_parameters())
        for name in [name for name in self._tensors if name.startswith(prefix)]:
            del self._tensors[name]
            if name in parameters:
                parameters[name].data = torch.empty(0)


def init_inference(
    model: PreTrainedModel | TensorSource, config: dict[str, Any] | str | Path | None = None, **options: Any
) -> InferenceEngine:
    """An engine that runs `model` on fused kernels.

    model: a Hugging Face causal language model of a supported architecture (it stays usable; its weights are copied,
    unless `consume_model=True`; those that are on the GPU already, in the right type, are shared), or a
    `presets.ModelSource`, whose weights are packed as they are read, so that they are in memory once.

    config, options: DeepSpeed-Inference's, see `Options`; a dict, a JSON file, keywords, or both.

    Raises ValueError for a model or an option that is not supported or damaged, and for what needs a GPU without one;
    NotImplementedError for options that labkit does not have yet; BuildError with impl="cpp" where the kernels can't be
    compiled.
    """
    read = read_options(config, options)
    hf_config = getattr(model, "hf_config", None) or getattr(model, "config", None)
    if not isinstance(hf_config, PretrainedConfig):
        raise TypeError(f"model: expected a transformers model or a labkit ModelSource, got {type(model).__name__}")
    policy = policy_for(hf_config)
    model_config = policy.model_config(hf_config)
    source = ModelTensors(model) if isinstance(model, PreTrainedModel) else model
    dtype = read.dtype or _own_dtype(model, hf_config)
    if dtype not in DTYPES.values():
        raise ValueError(f"the model is {dtype}; pass dtype=torch.float32, bfloat16, float16 or int8")
    impl = _resolved("triton" if read.use_triton else read.impl)
    device = gpu.default_device() if impl == "triton" else gpu.CPU
    if device.type != "cuda" and (read.enable_cuda_graph or read.dependent_launch):
        raise ValueError("enable_cuda_graph and dependent_launch need a GPU, and none is used; leave them out")
    if read.dependent_launch:
        gpu.require_dependent_launch()

    ranks = join_ranks(model_config, read.tensor_parallel, impl, device, lambda: _facts(hf_config, source, dtype, read))
    part = ranks.shard if ranks else shard(model_config)

    consumed = source if read.consume_model and isinstance(source, ModelTensors) else None
    if consumed:  # whatever can go wrong must go wrong before the first weight is taken
        check_weights(policy, model_config, consumed, impl)
    with torch.inference_mode():
        weights = build_weights(
            policy,
            model_config,
            source,
            dtype,
            impl,
            read.quant,
            done_with=(lambda layer: consumed.release(f"{policy.layers}.{layer}.")) if consumed else None,
            device=device,
            part=part,
        )
    if consumed:
        consumed.release("")
    module = FusedCausalLM(hf_config, model_config, policy, weights, impl, device, ranks)
    if impl == "triton" and ranks is None:
        from labkit.engine.graph import GpuDecoder

        graphs = device.type == "cuda" and read.enable_cuda_graph is not False
        launch = replace(gpu.default_launcher(), pdl=read.dependent_launch, launched=[])
        module.gpu = GpuDecoder(weights, launch, device, graphs=graphs, watched=bool(read.enable_cuda_graph))
    if isinstance(model, PreTrainedModel) and model.generation_config is not None:
        module.generation_config = copy.deepcopy(model.generation_config)
    return InferenceEngine(module, read)


def _facts(
    hf_config: PretrainedConfig, source: TensorSource, dtype: torch.dtype, options: Options
) -> dict[str, object]:
    """What the ranks of a model have to agree on. Of the weights that is where they come from, or a few numbers."""
    given = options.model_dump(exclude={"tensor_parallel", "dtype", "impl"}, mode="json", fallback=str)
    return {
        "dtype": str(dtype),
        "options": given,
        "config": json.loads(hf_config.to_json_string(use_diff=False)) | {"_name_or_path": None},
        "weights": getattr(source, "origin", None) or _fingerprint(source),
    }


def _fingerprint(source: TensorSource) -> str:
    """A digest of the first numbers of every tensor."""
    digest = blake2b(digest_size=16)
    for name in sorted(source.names()):
        first = source.get(name).flatten()[:16].float().contiguous()
        digest.update(name.encode() + first.numpy(force=True).tobytes())
    return digest.hexdigest()


def _own_dtype(model: Any, hf_config: PretrainedConfig) -> torch.dtype:
    if isinstance(model, PreTrainedModel):
        return model.dtype
    dtype = getattr(hf_config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _resolved(impl: str) -> str:
    if impl == "auto" and torch.cuda.is_available() and gpu.unavailable() is None:
        return "triton"
    if impl == "auto":
        return "cpp" if build.unavailable() is None else "reference"
    if impl == "triton":
        gpu.require()
    if impl == "cpp" and (reason := build.unavailable()):
        raise build.BuildError(reason)
    return impl
