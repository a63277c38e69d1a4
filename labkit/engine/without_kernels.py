"""Models without kernels in labkit: transformers' own code, with linears cut over the ranks."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from labkit.engine.engine import SlicedEngine
from labkit.engine.options import Options
from labkit.engine.parallel.ranks import join_group
from labkit.engine.parallel.slicing import tensor_parallel_model
from labkit.kernels.gpu import CPU
from labkit.models.encoder_policies import ENCODERS
from labkit.models.policy import Policy
from labkit.system.errors import UnsupportedError, UserError, UserTypeError
from labkit.weights.model_tensors import ModelTensors
from labkit.weights.protocol import TensorSource


def runs_without_kernels(model: Any, options: Options, policy: Policy | None) -> bool:
    """Tells whether torch's ops run the model: if there is an injection policy, or if the model is cut over ranks and
    is no decoder with a policy.
    """
    if options.injection_policy is not None:
        return True
    decoder = None if policy is None or policy.architecture in ENCODERS else policy
    has_row = decoder is not None and (not isinstance(model, PreTrainedModel) or _is_of(model, decoder))
    return options.tensor_parallel.ranks > 1 and not has_row


def _is_of(model: PreTrainedModel, policy: Policy) -> bool:
    """Tells whether a model is of the policy's class. Other classes may have the same model type."""
    return any(kind.__name__ == policy.architecture for kind in type(model).__mro__)


def sliced_engine(model: Any, options: Options) -> SlicedEngine:
    """Returns an engine for `model` with its linears cut over the ranks, by the injection policy or the data flow."""
    if not isinstance(model, PreTrainedModel):
        raise UserTypeError(
            f"model: expected a transformers model in memory, got {type(model).__name__}, for which labkit "
            "has no kernels"
        )
    _refuse_what_needs_kernels(options, type(model).__name__)
    device = torch.device("cuda") if torch.cuda.is_available() else CPU
    tp, rank = options.tensor_parallel, 0
    if tp.ranks > 1:
        facts = {
            "dtype": str(options.dtype),
            "config": config_facts(model.config),
            "weights": fingerprint(ModelTensors(model)),
        }
        rank = join_group(tp, device, facts)
    dtype = None if options.dtype == model.dtype else options.dtype  # parameters may have other types on purpose
    sliced = tensor_parallel_model(
        model,
        rank=rank,
        size=tp.ranks,
        group=tp.tp_group,
        injection_policy=options.injection_policy,
        consume=options.consume_model,
    )
    if options.consume_model:  # both share the memory of uncut weights
        ModelTensors(model).release("")
    return SlicedEngine(sliced.to(device, dtype), options)


def refuse_checkpoints(options: Options, model: str) -> None:
    """Raises NotImplementedError for options that load from a checkpoint or save one."""
    if options.checkpoint is not None or options.save_mp_checkpoint_path is not None:
        raise UnsupportedError(
            f"checkpoint and save_mp_checkpoint_path are for decoders with kernels, got {model}; leave them out"
        )


def refuse_options_of_fused_steps(options: Options, model: str, reason: str, *, pipeline: str) -> None:
    """Raises UserError with the reason for options that only fused steps and their cache have. pipeline: what to do
    instead of pipeline_parallel.
    """
    refuse_checkpoints(options, model)
    if options.pipeline_parallel.stages > 1:
        raise UserError(f"pipeline_parallel {reason}; {pipeline}")
    for name in ("offload", "kv_offload", "kv_dtype"):
        if getattr(options, name) is not None:
            raise UserError(f"{name} {reason}; leave it out")


def config_facts(hf_config: PretrainedConfig) -> dict[str, object]:
    """Returns a config as a dict for comparison between ranks."""
    return json.loads(hf_config.to_json_string(use_diff=False)) | {"_name_or_path": None}


def fingerprint(source: TensorSource) -> str:
    """Returns a digest of the first numbers of every tensor."""
    digest = blake2b(digest_size=16)
    for name in sorted(source.names()):
        first = source.get(name).flatten()[:16].float().contiguous()
        digest.update(name.encode() + first.numpy(force=True).tobytes())
    return digest.hexdigest()


def _refuse_what_needs_kernels(options: Options, model: str) -> None:
    reason = f"needs kernels, and there are none for {model}"
    refuse_options_of_fused_steps(options, model, reason, pipeline="use tensor_parallel")
    if options.dtype == torch.int8:
        raise UserError(f"dtype=int8 needs kernels, and there are none for {model}; use a floating type")
    if options.impl != "auto" or options.use_triton or options.enable_cuda_graph or options.dependent_launch:
        raise UserError(
            f"impl, use_triton and the options of CUDA graphs are for models with kernels, but {model} runs without "
            "kernels; leave them out"
        )
