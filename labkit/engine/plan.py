"""`init_inference` in four steps: a request is resolved, planned, built, and wrapped in an engine."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from labkit.engine.checkpoints import begin_saving
from labkit.engine.choices import stored_dtype
from labkit.engine.engine import DecoderEngine, EncoderEngine, InferenceEngine
from labkit.engine.hf.causal_lm import FusedCausalLM
from labkit.engine.hf.encoder import fused_encoder_model
from labkit.engine.memory.heads_on_host import HostMemory
from labkit.engine.memory.slots import SlotPool
from labkit.engine.memory.stores import BackingStore
from labkit.engine.offload.cache_place import cache_place
from labkit.engine.offload.held import on_host
from labkit.engine.offload.options import Offload
from labkit.engine.offload.prepared import prepared
from labkit.engine.offload.streaming import opened
from labkit.engine.options import read_options
from labkit.engine.parallel.pipeline_stage import PipelineStage, join_stages
from labkit.engine.parallel.ranks import Ranks, asked_to_join, join_ranks
from labkit.engine.parallel.shared_calls import SharedCalls
from labkit.engine.request import Request, hf_config_of, resolve
from labkit.engine.runners.layer_range import LayerRange
from labkit.engine.runners.one_call import OneCallRunner
from labkit.engine.runners.pipeline.runner import PipelineRunner
from labkit.engine.runners.runner import Runner
from labkit.engine.runners.staged import StagedRunner
from labkit.engine.runners.step import CHUNK_ROWS
from labkit.engine.runners.watched import RankedRunner, WatchedRunner
from labkit.engine.without_kernels import (
    config_facts,
    fingerprint,
    runs_without_kernels,
    sliced_engine,
)
from labkit.kernels import ModelWeights, gpu
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.slot_stream.queues import Queues, queues_of
from labkit.models.shards import shard
from labkit.system.errors import UserError
from labkit.weights.build import build_weights, check_weights
from labkit.weights.checkpoint.save import Saving
from labkit.weights.layer_split import split_layers
from labkit.weights.model_tensors import ModelTensors
from labkit.weights.protocol import TensorSource
from labkit.weights.resolve import resolve as resolve_name
from labkit.weights.spec import WeightSpec


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
        model = resolve_name(model) if isinstance(model, str | os.PathLike) else model
        hf_config = hf_config_of(model, read)
        if runs_without_kernels(model, read, hf_config):
            return sliced_engine(model, read)
        plan = make_plan(resolve(model, read, hf_config))
    with plan.calls.one("init_inference"):
        return wrap(plan, *build_planned(plan))


@dataclass(frozen=True)
class Plan:
    """All decisions before the first weight is read."""

    request: Request  # with the spec of this process's weights
    kv_dtype: torch.dtype  # of stored keys and values
    device: torch.device
    ranks: Ranks | None  # rank group with the same layers
    stage: PipelineStage | None  # connection to the ranks with other layers
    calls: SharedCalls  # of all ranks
    saving: Saving | None  # checkpoint that is written while packing
    backing_store: BackingStore | None  # backing store of offloaded keys and values
    queues: Queues  # of the device, for everything that it fetches

    @property
    def spec(self) -> WeightSpec:
        return self.request.spec

    @property
    def consumed(self) -> ModelTensors | None:
        """The passed model's tensors, if packing removes them from the model."""
        source = self.request.source
        return source if self.request.options.consume_model and isinstance(source, ModelTensors) else None


def make_plan(request: Request) -> Plan:
    """Decides on kernels, device and types, and joins the other ranks."""
    options, spec, impl = request.options, request.spec, request.spec.impl
    kv_dtype = stored_dtype(options.kv_dtype, spec.dtype)
    device = gpu.default_device() if impl == "triton" else gpu.CPU
    if device.type != "cuda" and (options.enable_cuda_graph or options.dependent_launch):
        raise UserError("enable_cuda_graph and dependent_launch need a GPU, and none is used; leave them out")
    if options.offload is not None:
        options.offload.check_for(impl)
    if options.kv_offload is not None:
        options.kv_offload.check_for(impl)
    if options.dependent_launch:
        gpu.require_dependent_launch()
    stage, tp = _join_stages(request, device), options.tensor_parallel
    layers = None if stage is None else stage.layers[stage.number]
    tp = tp if stage is None else stage.tp
    ranks = join_ranks(spec.config, tp, impl, device, CHUNK_ROWS, lambda: _facts(request), layers)
    if (ranks or stage) and device.type == "cuda":  # on joining, each rank chose its own GPU as the current one
        device = gpu.default_device()
    spec = replace(spec, part=ranks.shard if ranks else shard(spec.config, layers=layers))
    calls = SharedCalls([*([ranks] if ranks else []), *([stage.ring] if stage else [])])
    queues, backing_store = queues_of(device), None
    with calls.one("plan"):
        if options.kv_offload is not None:
            backing_store = cache_place(options.kv_offload, spec.dtype, device, ranks, calls.gather, queues)
        saving = begin_saving(options, spec, request.hf_config, calls.gather)
    request = replace(request, spec=spec)
    return Plan(request, kv_dtype, device, ranks, stage, calls, saving, backing_store, queues)


def _join_stages(request: Request, device: torch.device) -> PipelineStage | None:
    """Joins the ranks with the other layers, and returns the stage of this process; None: it has all layers."""
    options, spec, pipeline = request.options, request.spec, request.options.pipeline_parallel
    if pipeline.stages == 1:
        return None
    layers = split_layers(spec, pipeline.stages, pipeline.layers)
    most_bytes = 4 * CHUNK_ROWS * spec.config.hidden_size
    tp = options.tensor_parallel
    return join_stages(layers, pipeline, tp, spec.impl, device, lambda: _facts(request), most_bytes)


def build_planned(plan: Plan) -> tuple[ModelWeights, StreamedLayers | None]:
    """Returns the weights of the plan, packed for its kernels and saved if requested, and the offloaded layers (None:
    all layers are resident).
    """
    if plan.request.options.offload is not None:
        return _streamed(plan, plan.request.options.offload)
    request, consumed, saving = plan.request, plan.consumed, plan.saving
    done_with = _layer_remover(plan)
    with saving or nullcontext(), torch.inference_mode():
        keep = saving.keep if saving else None
        weights = build_weights(plan.spec, request.source, plan.device, done_with=done_with, keep=keep)
        if saving:
            saving.finish(request.generation_config, getattr(request.source, "folder", None))
    if consumed:
        consumed.release("")
    return weights, None


def _layer_remover(plan: Plan) -> Callable[[int], None] | None:
    """Returns a function that removes a packed layer from the passed model; None: the model is kept. All checks are
    here, before the first weight is removed.
    """
    consumed, layers = plan.consumed, plan.spec.policy.layers
    if consumed is None:
        return None
    check_weights(plan.spec, consumed)
    return lambda layer: consumed.release(f"{layers}.{layer}.")


def _streamed(plan: Plan, offload: Offload) -> tuple[ModelWeights, StreamedLayers | None]:
    request, spec, gather = plan.request, plan.spec, plan.calls.gather
    if offload.device == "cpu":
        weights_and_stream = on_host(
            spec, request.source, offload, gather, plan.device, plan.queues, _layer_remover(plan)
        )
        if plan.consumed:
            plan.consumed.release("")
        return weights_and_stream
    saved = prepared(spec, request.source, request.hf_config, offload.path, gather)
    if plan.consumed:
        plan.consumed.release("")
    return opened(spec, saved, offload, gather, plan.device, plan.queues)


def wrap(plan: Plan, weights: ModelWeights, streamed: StreamedLayers | None = None) -> InferenceEngine:
    """Returns the engine with the weights."""
    request, spec, options = plan.request, plan.spec, plan.request.options
    if request.is_encoder:
        injected = fused_encoder_model(
            request.model,
            spec,
            weights,
            plan.device,
            consume=plan.consumed is not None,
        )
        return EncoderEngine(injected, options, spec.impl, spec.policy.layers.split(".")[0])
    pool = None
    if spec.impl == "triton":
        memory = plan.backing_store if isinstance(plan.backing_store, HostMemory) else None
        pool = SlotPool(spec.part.local, plan.kv_dtype, plan.device, memory)
    layer_range = LayerRange(spec, weights, plan.device, plan.ranks, pool, plan.kv_dtype, streamed, plan.backing_store)
    staged = StagedRunner(layer_range)
    module = FusedCausalLM(
        request.hf_config,
        spec.config,
        spec.policy,
        choose_runner(plan, staged),
        staged.layers,
        weights,
        plan.device,
    )
    if request.generation_config is not None:
        module.generation_config = copy.deepcopy(request.generation_config)
    return DecoderEngine(module, options, spec.impl)


def choose_runner(plan: Plan, staged: StagedRunner) -> Runner:
    """Returns the runner of the steps. Only this function distinguishes implementations, devices and ranks."""
    layer_range, options, ranks, calls = staged.layer_range, plan.request.options, plan.ranks, plan.calls
    runner: Runner
    if plan.spec.impl == "triton" and ranks is None:
        from labkit.engine.runners.cuda_graph import CudaGraphRunner, GpuDecoder

        resident = not layer_range.once_a_step  # a graph needs weights, keys and values at fixed addresses
        graphs = resident and plan.device.type == "cuda" and options.enable_cuda_graph is not False
        launch = replace(gpu.default_launcher(), pdl=options.dependent_launch, launched=[])
        watched = bool(options.enable_cuda_graph)
        decoder = GpuDecoder(
            layer_range.weights, launch, plan.device, graphs=graphs, watched=watched, streamed=layer_range.streamed
        )
        runner = CudaGraphRunner(staged, decoder)
    else:
        fast = OneCallRunner(layer_range) if plan.spec.impl == "cpp" else staged
        runner = WatchedRunner(fast, staged) if ranks is None else RankedRunner(fast, staged, calls)
    return runner if plan.stage is None else PipelineRunner(runner, plan.stage, calls)


def _facts(request: Request) -> dict[str, object]:
    """Returns the facts that the ranks of a model have to agree on. For the weights: their origin, or a few numbers."""
    options = request.options.model_dump(exclude={"tensor_parallel", "dtype", "impl"}, mode="json", fallback=str)
    return {
        "dtype": str(request.spec.dtype),
        "options": options,
        "config": config_facts(request.hf_config),
        "weights": getattr(request.source, "origin", None) or fingerprint(request.source),
    }
