"""`init_inference`: a model is resolved, planned, built, and wrapped in an engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from labkit.engine.build import build, join
from labkit.engine.engine import InferenceEngine
from labkit.engine.injected.injected_engine import injected_engine
from labkit.engine.injected.on_ranks import is_sliced, sliced_engine
from labkit.engine.options import Options, read_options
from labkit.engine.parallel.ranks import asked_to_join
from labkit.engine.plan import make_plan, missing_in_triton
from labkit.engine.proof import derive
from labkit.engine.resolve import chosen_impl, hf_config_of, resolve
from labkit.engine.wrap import wrap
from labkit.kernels.build import unavailable
from labkit.models.encoder_policies import encoder_policy_for
from labkit.models.policies import find_policy
from labkit.models.policy import Policy
from labkit.weights.protocol import TensorSource
from labkit.weights.resolve import resolve as resolve_name


def init_inference(
    model: PreTrainedModel | TensorSource | PretrainedConfig | str | os.PathLike[str],
    config: dict[str, Any] | str | Path | None = None,
    **options: Any,
) -> InferenceEngine:
    """Returns an engine that runs `model` on fused kernels.

    model: one of

    - a Hugging Face causal language model of a supported architecture. It stays usable. Its weights are copied, unless
      `consume_model=True`; weights that are on the GPU already, in the right type, are shared.
    - a `weights.source.ModelSource`, whose weights are packed while they are read, so that they are in memory once.
    - a model around BertModel, RobertaModel or DistilBertModel. Its layers are fused, and it keeps its class,
      embeddings and heads.
    - a name, folder or file as in `labkit.resolve`.
    - with the option `checkpoint`, from which the weights are read: a model without memory, or its config.

    config, options: options of DeepSpeed-Inference, see `Options`; a dict, a JSON file, keywords, or both.

    Raises ValueError for a model or an option that is not supported or damaged, and without a GPU for options that need
    one; NotImplementedError for options that labkit does not have yet; BuildError with impl="cpp" if the
    kernels can't be compiled.
    """
    with asked_to_join(config, options):
        read = read_options(config, options)
        model = resolve_name(model, any_architecture=True) if isinstance(model, str | os.PathLike) else model
        hf_config = hf_config_of(model, read)
        policy, refusal = encoder_policy_for(model) or find_policy(hf_config), ""
        if policy is None and read.injection_policy is None:
            derived = derive(model if isinstance(model, PreTrainedModel) else hf_config, engine_with_row)
            policy, refusal = derived.policy, derived.refusal
        if policy is not None and (reason := _without_kernels(policy, hf_config, read)):
            policy, refusal = None, reason
        if is_sliced(model, read, policy):
            return sliced_engine(model, read, refusal or "it is cut by the flow of data")
        if policy is None:
            return injected_engine(model, read, refusal)
        plan = make_plan(resolve(model, read, hf_config, policy))
        team = join(plan)
    with team.calls.one("init_inference"):
        return wrap(plan, team, build(plan, team))


def _without_kernels(policy: Policy, hf_config: PretrainedConfig, options: Options) -> str | None:
    """What the kernels of a row lack, so that hooks take its place; None: nothing."""
    config = policy.model_config(hf_config)
    if options.tensor_parallel.ranks > 1 and config.qk_norm_whole:
        return "its norms over all heads cannot be cut over ranks"
    missing = missing_in_triton(config) if options.impl == "auto" else None
    return missing if missing and chosen_impl(options.impl) == "triton" else None


def engine_with_row(model: PreTrainedModel, policy: Policy) -> InferenceEngine:
    """The engine of a model in memory with this row, in float32 on the CPU's kernels."""
    options = Options(dtype=torch.float32, impl="reference" if unavailable() else "cpp")
    plan = make_plan(resolve(model, options, model.config, policy))
    team = join(plan)
    return wrap(plan, team, build(plan, team))
