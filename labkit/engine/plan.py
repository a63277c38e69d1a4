"""`init_inference`: a model, DeepSpeed's options, and out of them an engine."""

import copy
import json
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from labkit.engine.checkpoints import as_saved, begin_saving
from labkit.engine.engine import EncoderEngine, InferenceEngine, SlicedEngine
from labkit.engine.hf.causal_lm import FusedCausalLM
from labkit.engine.hf.encoder import fused_encoder_model
from labkit.engine.options import DTYPES, Options, read_options
from labkit.engine.parallel.ranks import join_group, join_ranks
from labkit.engine.parallel.slicing import tensor_parallel_model
from labkit.kernels import build, gpu
from labkit.models.encoder_policies import ENCODERS, encoder_policy_for
from labkit.models.policies import find_policy, policy_for
from labkit.models.shards import shard
from labkit.system.errors import UnsupportedError, UserError, UserTypeError
from labkit.weights.build import build_weights, check_weights
from labkit.weights.checkpoint.described import described_source
from labkit.weights.model_tensors import ModelTensors
from labkit.weights.protocol import TensorSource


def init_inference(
    model: PreTrainedModel | TensorSource | PretrainedConfig,
    config: dict[str, Any] | str | Path | None = None,
    **options: Any,
) -> InferenceEngine:
    """An engine that runs `model` on fused kernels.

    model: a Hugging Face causal language model of a supported architecture (it stays usable; its weights are copied,
    unless `consume_model=True`; those that are on the GPU already, in the right type, are shared), or a
    `presets.ModelSource`, whose weights are packed as they are read, so that they are in memory once. Or a model around
    BertModel, RobertaModel or DistilBertModel: its layers are fused, and it keeps its class, embeddings and heads. With
    the option `checkpoint` the weights come from there, and `model` may be a model without memory or its config.

    config, options: DeepSpeed-Inference's, see `Options`; a dict, a JSON file, keywords, or both.

    Raises ValueError for a model or an option that is not supported or damaged, and for what needs a GPU without one;
    NotImplementedError for options that labkit does not have yet; BuildError with impl="cpp" where the kernels can't be
    compiled.
    """
    read = read_options(config, options)
    hf_config = getattr(model, "hf_config", None) or getattr(model, "config", None)
    if isinstance(model, PretrainedConfig) and read.checkpoint is not None:
        hf_config = model
    if not isinstance(hf_config, PretrainedConfig):
        raise UserTypeError(f"model: expected a transformers model or a labkit ModelSource, got {type(model).__name__}")
    encoder = encoder_policy_for(model)
    if _runs_without_kernels(read, hf_config, encoder is not None):
        return _sliced(model, read)
    policy = encoder or policy_for(hf_config, also=ENCODERS)
    model_config = policy.model_config(hf_config)
    if encoder:
        _refuse_what_encoders_lack(read)
        _refuse_checkpoints(read, policy.architecture)
    source: TensorSource
    if read.checkpoint is not None:
        source = described_source(read.checkpoint, hf_config, read.base_dir)
    elif isinstance(model, PreTrainedModel):
        source = ModelTensors(model.base_model, f"{policy.layers}.") if encoder else ModelTensors(model)
    else:
        assert not isinstance(model, PretrainedConfig)
        source = model
    read = as_saved(read, source)
    dtype = read.dtype or _own_dtype(model, hf_config)
    if dtype not in DTYPES.values():
        raise UserError(f"the model is {dtype}; pass dtype=torch.float32, bfloat16, float16 or int8")
    impl = _resolved("triton" if read.use_triton else read.impl)
    device = gpu.default_device() if impl == "triton" else gpu.CPU
    if device.type != "cuda" and (read.enable_cuda_graph or read.dependent_launch):
        raise UserError("enable_cuda_graph and dependent_launch need a GPU, and none is used; leave them out")
    if read.dependent_launch:
        gpu.require_dependent_launch()

    ranks = join_ranks(model_config, read.tensor_parallel, impl, device, lambda: _facts(hf_config, source, dtype, read))
    part = ranks.shard if ranks else shard(model_config)
    saving = begin_saving(read, hf_config, model_config, dtype, impl, part)

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
            keep=saving.keep if saving else None,
        )
    if saving:
        saving.finish(getattr(model, "generation_config", None), getattr(source, "folder", None))
    if consumed:
        consumed.release("")
    if encoder:
        injected = fused_encoder_model(
            model, policy, model_config, weights, dtype, impl, device, consume=consumed is not None
        )
        return EncoderEngine(injected, read, policy.layers.split(".")[0])
    module = FusedCausalLM(hf_config, model_config, policy, weights, impl, device, ranks)
    if impl == "triton" and ranks is None:
        from labkit.engine.runners.cuda_graph import GpuDecoder

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
        "config": _config_facts(hf_config),
        "weights": getattr(source, "origin", None) or _fingerprint(source),
    }


def _config_facts(hf_config: PretrainedConfig) -> dict[str, object]:
    return json.loads(hf_config.to_json_string(use_diff=False)) | {"_name_or_path": None}


def _fingerprint(source: TensorSource) -> str:
    """A digest of the first numbers of every tensor."""
    digest = blake2b(digest_size=16)
    for name in sorted(source.names()):
        first = source.get(name).flatten()[:16].float().contiguous()
        digest.update(name.encode() + first.numpy(force=True).tobytes())
    return digest.hexdigest()


def _runs_without_kernels(read: Options, hf_config: PretrainedConfig, encoder: bool) -> bool:
    """Whether torch's ops run the model, cut over ranks: asked for by an injection policy, or because there is no row
    for the architecture that is cut.
    """
    if read.injection_policy is not None:
        return True
    return read.tensor_parallel.ranks > 1 and (encoder or find_policy(hf_config) is None)


def _sliced(model: Any, read: Options) -> SlicedEngine:
    """`model` as it is, its linears cut over the ranks by the injection policy, or as its data flow."""
    if not isinstance(model, PreTrainedModel):
        raise UserTypeError(
            f"model: expected a transformers model in memory, got {type(model).__name__}, for which labkit "
            "has no kernels"
        )
    _refuse_checkpoints(read, type(model).__name__)
    if read.dtype == torch.int8:
        raise UserError(f"dtype=int8 needs kernels, and there are none for {type(model).__name__}; use a floating type")
    if read.impl != "auto" or read.use_triton or read.enable_cuda_graph or read.dependent_launch:
        raise UserError(
            f"impl, use_triton and the options of CUDA graphs are for models with kernels, which "
            f"{type(model).__name__} runs without here; leave them out"
        )
    tp = read.tensor_parallel
    device = torch.device("cuda") if torch.cuda.is_available() else gpu.CPU
    rank = 0
    if tp.ranks > 1:
        facts = {
            "dtype": str(read.dtype),
            "config": _config_facts(model.config),
            "weights": _fingerprint(ModelTensors(model)),
        }
        rank = join_group(tp, device, facts)
    whole = model if read.dtype in (None, model.dtype) else copy.deepcopy(model).to(read.dtype)
    consume = read.consume_model or whole is not model
    sliced = tensor_parallel_model(
        whole, rank=rank, size=tp.ranks, group=tp.tp_group, injection_policy=read.injection_policy, consume=consume
    )
    return SlicedEngine(sliced.to(device), read)


def _refuse_what_encoders_lack(read: Options) -> None:
    if read.enable_cuda_graph or read.dependent_launch:
        raise UnsupportedError("enable_cuda_graph and dependent_launch are for decode steps, an encoder has none")
    if read.quant.lm_head:
        raise UserError("quant.lm_head: an encoder's head stays transformers' own; leave it out")


def _refuse_checkpoints(read: Options, model: str) -> None:
    if read.checkpoint is not None or read.save_mp_checkpoint_path is not None:
        raise UnsupportedError(
            f"checkpoint and save_mp_checkpoint_path are for decoders with kernels, got {model}; leave them out"
        )


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
