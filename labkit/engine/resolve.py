"""First step of `init_inference`: the source of a model's tensors, and the facts of its weights."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from labkit.engine.alterations import refuse_alterations
from labkit.engine.options import Options
from labkit.engine.without_row import refuse_checkpoints
from labkit.kernels import build, gpu
from labkit.models.dtypes import DTYPES
from labkit.models.encoder_policies import ENCODERS
from labkit.models.policies import policy_for
from labkit.models.policy import Policy
from labkit.models.shards import shard
from labkit.models.token_ids import TOKEN_IDS
from labkit.system.errors import UnsupportedError, UserError, UserTypeError
from labkit.weights.build import has_codes, saved_in
from labkit.weights.checkpoint.described import described_source
from labkit.weights.model_tensors import ModelTensors
from labkit.weights.protocol import TensorSource, has_own_head
from labkit.weights.quantise import NO_ROUNDING
from labkit.weights.spec import WeightSpec

log = logging.getLogger("labkit")


@dataclass(frozen=True)
class Request:
    """A model of a known architecture, the source of its tensors, and the options."""

    model: Any
    hf_config: PretrainedConfig
    source: TensorSource
    options: Options
    spec: WeightSpec  # of the whole model, until ranks divide it
    generation_config: GenerationConfig | None  # of the model; None: it has none

    @property
    def is_encoder(self) -> bool:
        return not self.spec.config.causal


def hf_config_of(model: Any, options: Options) -> PretrainedConfig:
    """Returns the config of a model or source. With a checkpoint, `model` may be a config. Raises TypeError for other
    objects.
    """
    if isinstance(model, PretrainedConfig) and options.checkpoint is not None:
        return model
    holds_tensors = isinstance(model, PreTrainedModel) or all(hasattr(model, name) for name in ("names", "get"))
    hf_config = getattr(model, "hf_config", None) or getattr(model, "config", None)
    if not (holds_tensors and isinstance(hf_config, PretrainedConfig)):  # an engine has a config too
        raise UserTypeError(
            f"model: expected a transformers model or a labkit ModelSource, got {type(model).__name__}; if "
            "torch.compile, DistributedDataParallel or peft has wrapped the model, pass the model inside (for peft: "
            "model.merge_and_unload())"
        )
    return hf_config


def resolve(model: Any, options: Options, hf_config: PretrainedConfig, policy: Policy | None) -> Request:
    """Returns the request for a model.

    policy: the model's row; None: it has no row, and UserError is raised.

    A model with its own head keeps it, even if the config ties it. Raises UserError for a model that was changed in
    other ways than the weights.
    """
    policy = policy or policy_for(hf_config, also=ENCODERS)
    encoder = policy.architecture in ENCODERS
    if encoder:
        _refuse_decoder_options(options, policy.architecture)
    source: TensorSource = model
    if options.checkpoint is not None:
        source = described_source(options.checkpoint, hf_config, options.base_dir)
    elif isinstance(model, PreTrainedModel):
        source = ModelTensors(model.base_model, f"{policy.layers}.") if encoder else ModelTensors(model)
    config, generation_config = policy.model_config(hf_config), _generation_config(model)
    policy.check(config, source.names())
    if isinstance(model, PreTrainedModel):
        refuse_alterations(model, policy, config)
    if config.tied_head and isinstance(source, ModelTensors) and has_own_head(policy, source):
        hf_config, config = copy.deepcopy(hf_config), replace(config, tied_head=False)
        hf_config.tie_word_embeddings = False
    options = _as_saved(options, source)
    spec = WeightSpec(
        policy=policy,
        part=shard(config),
        dtype=_matrix_dtype(options.dtype, model, hf_config),
        impl=chosen_impl("triton" if options.use_triton else options.impl),
        quant=options.quant,
    )
    return Request(model, hf_config, source, options, spec, generation_config)


def _refuse_decoder_options(options: Options, architecture: str) -> None:
    """Raises ValueError for options that have no meaning for an encoder."""
    for name in ("kv_dtype", "kv_offload"):
        if getattr(options, name) is not None:
            raise UserError(f"{name} is for the cache of a decoder, an encoder keeps none; leave it out")
    if options.offload is not None:
        raise UnsupportedError("offload is for the layers of a decoder, and this is an encoder; leave it out")
    if options.pipeline_parallel.stages > 1:
        raise UnsupportedError(
            "pipeline_parallel is for the layers of a decoder, and this is an encoder; cut it with tensor_parallel"
        )
    if options.enable_cuda_graph or options.dependent_launch:
        raise UnsupportedError("enable_cuda_graph and dependent_launch are for decode steps, an encoder has none")
    if options.quant.lm_head:
        raise UserError("quant.lm_head: an encoder's head stays transformers' own; leave it out")
    refuse_checkpoints(options, architecture)


def _generation_config(model: Any) -> GenerationConfig | None:
    """Returns a copy of the model's generation config with plain integers as token ids, as JSON and ranks need them;
    None: the model has none.
    """
    original = getattr(model, "generation_config", None)
    if original is None:
        return None
    config = copy.deepcopy(original)
    for name in TOKEN_IDS:
        value = getattr(config, name, None)
        setattr(config, name, [_plain(item) for item in value] if isinstance(value, list | tuple) else _plain(value))
    return config


def _plain(value: Any) -> Any:
    """Returns the Python value of a tensor, a numpy array or a numpy number."""
    return value.tolist() if hasattr(value, "tolist") else value


def _as_saved(options: Options, source: TensorSource) -> Options:
    """Returns options with the type and the quantisation of the saved weights, unless another type is requested.

    Raises ValueError for another quantisation: int8 weights are never quantised again.
    """
    if has_codes(source):
        kept = options.quant.model_copy(update={"as_stored": True})
        return options if options.dtype else options.model_copy(update={"dtype": torch.int8, "quant": kept})
    saved = saved_in(source)
    if saved is None or options.dtype not in (None, saved.dtype):
        return options
    if saved.dtype != torch.int8:
        return options.model_copy(update={"dtype": saved.dtype})
    saved_quant, requested = saved.manifest.quant, options.quant
    assert saved_quant is not None
    stored = {"activation": NO_ROUNDING}  # saved weights do not depend on the rounding of activations
    agree = requested.model_copy(update=stored) == saved_quant.model_copy(update=stored)
    if requested.model_fields_set - {"enabled", "activation"} and not agree:
        got = requested.model_dump_json(exclude_unset=True, exclude={"activation"})
        expected = saved_quant.model_dump_json(exclude_defaults=True, exclude={"activation"})
        raise UserError(f"{saved.folder} was saved with quant={expected}, got {got}; leave quant out")
    kept = saved_quant.model_copy(update={"activation": requested.activation})
    return options.model_copy(update={"dtype": saved.dtype, "quant": kept})


def _matrix_dtype(requested: torch.dtype | None, model: Any, hf_config: PretrainedConfig) -> torch.dtype:
    """Returns the type of the layers' matrices: the requested one, or the model's own."""
    dtype = requested or own_dtype(model, hf_config)
    if dtype not in DTYPES.values():
        raise UserError(f"the model is {dtype}; pass dtype=torch.float32, bfloat16, float16 or int8")
    return dtype


def own_dtype(model: Any, hf_config: PretrainedConfig) -> torch.dtype:
    """Returns the type of the passed model, or of its config."""
    if isinstance(model, PreTrainedModel):
        return model.dtype
    dtype = getattr(hf_config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def chosen_impl(requested: str) -> str:
    """Returns the implementation for this machine. If "auto" does not get a fast one, one line on stderr says why."""
    if requested == "auto" and torch.cuda.is_available() and gpu.unavailable() is None:
        return "triton"
    if requested == "auto":
        reason = build.unavailable()
        if reason is None:
            return "cpp"
        log.warning("labkit: the reference kernels run, which are slow: %s", reason)
        return "reference"
    if requested == "triton":
        gpu.require()
    if requested == "cpp" and (reason := build.unavailable()):
        raise build.BuildError(reason)
    return requested
