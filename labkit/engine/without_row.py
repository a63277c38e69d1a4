"""Models without a row: the options that they refuse, and the facts on which their ranks agree."""

from __future__ import annotations

import json
from hashlib import blake2b

from transformers import PretrainedConfig

from labkit.engine.options import Options
from labkit.system.errors import UnsupportedError, UserError
from labkit.weights.protocol import TensorSource


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
    if options.moe.parts > 1:
        raise UserError(f"moe {reason}; leave it out")
    for name in ("offload", "kv_offload", "kv_dtype"):
        if getattr(options, name) is not None:
            raise UserError(f"{name} {reason}; leave it out")


def refuse_what_needs_a_row(options: Options, model: str) -> None:
    """Raises UserError for options of the fused decode step and its cache."""
    none = f"{model} has none" + ("" if options.injection_policy is None else " with an injection_policy")
    refuse_options_of_fused_steps(options, model, f"needs a row, and {none}", pipeline="leave it out")
    if options.quant.flat is not None:
        raise UserError(f"quantization_setting needs a row, and {none}; use quant")
    if options.impl not in ("auto", "cpp") or options.use_triton or options.enable_cuda_graph:
        raise UserError(
            f"{model} has no row, and such models run on the C++ kernels; leave impl, use_triton and "
            "enable_cuda_graph out"
        )


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
