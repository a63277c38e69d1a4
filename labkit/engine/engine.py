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
from labkit.encoder_policies import ENCODERS, encoder_policy_for
from labkit.engine.encoder import FusedEncoder, fused_encoder_model
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
        raise TypeError(f"{type(self.module).__name__} is an encoder and generates no text; call the engine itself")


class ModelTensors:
    """The tensors of a model in memory, those below `prefix`; `release` empties a layer's parameters once they are
    packed.
    """

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        self.model = model
        self._tensors = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(prefix)}

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
    `presets.ModelSource`, whose weights are packed as they are read, so that they are in memory once. Or a model around
    BertModel, RobertaModel or DistilBertModel: its layers are fused, and it keeps its class, embeddings and heads.

    config, options: DeepSpeed-Inference's, see `Options`; a dict, a JSON file, keywords, or both.

    Raises ValueError for a model or an option that is not supported or damaged, and for what needs a GPU without one;
    NotImplementedError for options that labkit does not have yet; BuildError with impl="cpp" where the kernels can't be
    compiled.
    """
    read = read_options(config, options)
    hf_config = getattr(model, "hf_config", None) or getattr(model, "config", None)
    if not isinstance(hf_config, PretrainedConfig):
        raise TypeError(f"model: expected a transformers model or a labkit ModelSource, got {type(model).__name__}")
    encoder = encoder_policy_for(model)
    policy = encoder or policy_for(hf_config, also=ENCODERS)
    model_config = policy.model_config(hf_config)
    if encoder:
        _refuse_what_encoders_lack(read)
    source: TensorSource = model
    if isinstance(model, PreTrainedModel):
        source = ModelTensors(model.base_model, f"{policy.layers}.") if encoder else ModelTensors(model)
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
    if encoder:
        injected = fused_encoder_model(
            model, policy, model_config, weights, dtype, impl, device, consume=consumed is not None
        )
        return EncoderEngine(injected, read, policy.layers.split(".")[0])
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


def _refuse_what_encoders_lack(read: Options) -> None:
    if read.enable_cuda_graph or read.dependent_launch:
        raise NotImplementedError("enable_cuda_graph and dependent_launch are for decode steps, an encoder has none")
    if read.tensor_parallel.enabled and read.tensor_parallel.tp_size > 1:
        raise NotImplementedError("tensor_parallel: encoders are not cut over ranks yet; use tp_size=1")
    if read.quant.lm_head:
        raise ValueError("quant.lm_head: an encoder's head stays transformers' own; leave it out")


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
