"""Models without a row on several ranks: each rank has its share of the linears, and hooks pack this share."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from labkit.engine.engine import HostedEngine, SlicedEngine
from labkit.engine.injected.injected_engine import (
    check_memory,
    engine_of,
    loading,
    name_of,
    require_kernels,
    require_model,
)
from labkit.engine.options import Options
from labkit.engine.parallel.ranks import join_group
from labkit.engine.parallel.slicing import tensor_parallel_model
from labkit.engine.without_row import (
    config_facts,
    fingerprint,
    refuse_options_of_fused_steps,
    refuse_what_needs_a_row,
)
from labkit.kernels.gpu import CPU
from labkit.models.encoder_policies import ENCODERS
from labkit.models.policy import Policy
from labkit.system.errors import UserError
from labkit.weights.model_tensors import ModelTensors
from labkit.weights.source import ModelSource


def is_sliced(model: Any, options: Options, policy: Policy | None) -> bool:
    """Tells whether transformers' code runs the model with linears that are cut over ranks: if there is an injection
    policy, or if there are ranks and the model is no decoder with a policy.
    """
    if options.injection_policy is not None:
        return True
    decoder = None if policy is None or policy.architecture in ENCODERS else policy
    has_row = decoder is not None and (not isinstance(model, PreTrainedModel) or _is_of(model, decoder))
    return options.tensor_parallel.ranks > 1 and not has_row


def _is_of(model: PreTrainedModel, policy: Policy) -> bool:
    """Tells whether a model is of the policy's class. Other classes may have the same model type."""
    return any(kind.__name__ == policy.architecture for kind in type(model).__mro__)


def sliced_engine(model: Any, options: Options, why: str) -> HostedEngine:
    """Returns an engine for `model` with its linears cut over the ranks, by the injection policy or the data flow. On
    a CPU their shares are packed for the kernels, on a GPU torch multiplies them.

    why: the model has no row.
    """
    require_model(model, why)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        _refuse_what_needs_kernels(options, name_of(model))
    else:
        refuse_what_needs_a_row(options, name_of(model))
        require_kernels()
    consume = options.consume_model or isinstance(model, ModelSource)
    if isinstance(model, ModelSource):
        dtype, load = loading(model, options)
        model = load()
    else:
        dtype = options.dtype or model.dtype
        if not on_gpu:
            check_memory(model)
    device = torch.device("cuda") if on_gpu else CPU
    tp, rank = options.tensor_parallel, 0
    if tp.ranks > 1:
        facts = {
            "dtype": str(options.dtype),
            "quant": options.quant.model_dump(mode="json"),
            "config": config_facts(model.config),
            "weights": fingerprint(ModelTensors(model)),
        }
        rank = join_group(tp, device, facts)
    sliced = tensor_parallel_model(
        model,
        rank=rank,
        size=tp.ranks,
        group=tp.tp_group,
        injection_policy=options.injection_policy,
        consume=consume,
    )
    if consume:  # both share the memory of uncut weights
        ModelTensors(model).release("")
    if on_gpu:  # parameters may have other types on purpose
        return SlicedEngine(sliced.to(device, None if dtype == model.dtype else dtype), options)
    return engine_of(sliced, dtype, options, why, consume=True)


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
