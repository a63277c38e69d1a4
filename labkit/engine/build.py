"""Third step of `init_inference`: joins the ranks of a plan, and packs their weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from platform import node

import torch

from labkit.engine.memory.heads_on_host import HostMemory
from labkit.engine.memory.stores import BackingStore
from labkit.engine.offload.cache_folder import cache_folder
from labkit.engine.offload.experts import with_experts_on_disk
from labkit.engine.offload.host import on_host
from labkit.engine.offload.options import KvOffload, Offload
from labkit.engine.offload.prepared import prepared
from labkit.engine.offload.streaming import opened
from labkit.engine.parallel.pipeline_stage import PipelineStage, join_stages
from labkit.engine.parallel.ranks import Ranks, join_ranks
from labkit.engine.parallel.shared_calls import SharedCalls
from labkit.engine.plan import Plan
from labkit.engine.resolve import Request
from labkit.engine.runners.step import CHUNK_ROWS
from labkit.engine.without_row import config_facts, fingerprint
from labkit.kernels import ModelWeights, gpu
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.slot_stream.queues import Queues, queues_of
from labkit.models.shards import shard
from labkit.system.home import expanded
from labkit.weights.build import build_weights, check_weights, packing_shown
from labkit.weights.checkpoint.save import Saving
from labkit.weights.spec import WeightSpec


@dataclass(frozen=True)
class Team:
    """Connection of this process to the other ranks of the model."""

    spec: WeightSpec  # of this process's weights
    device: torch.device
    ranks: Ranks | None  # rank group with the same layers; None: one rank has them
    stage: PipelineStage | None  # connection to the ranks with other layers; None: this stage has all
    calls: SharedCalls  # of all ranks


@dataclass(frozen=True)
class Built:
    """Weights and backing store of an engine."""

    weights: ModelWeights
    streamed: StreamedLayers | None  # offloaded layers; None: all are resident
    backing_store: BackingStore | None  # of offloaded keys and values; None: they are resident


def join(plan: Plan) -> Team:
    """Returns the connection to the other ranks, once all agree on the model and its options."""
    request, device = plan.request, plan.device
    options, spec = request.options, request.spec
    tp = options.tensor_parallel
    stage: PipelineStage | None = None
    layers: range | None = None
    if plan.stages is not None:
        most_bytes = 4 * CHUNK_ROWS * spec.config.hidden_size
        pipeline = options.pipeline_parallel
        stage = join_stages(plan.stages, pipeline, tp, spec.impl, device, lambda: _facts(request), most_bytes)
        tp, layers = stage.tp, stage.layers[stage.number]
    ranks = join_ranks(
        spec.config, tp, spec.impl, device, CHUNK_ROWS, lambda: _facts(request), layers, options.moe.parts
    )
    if (ranks or stage) and device.type == "cuda":  # on joining, each rank chose its own GPU as the current one
        device = gpu.default_device()
    spec = replace(spec, part=ranks.shard if ranks else shard(spec.config, layers=layers))
    calls = SharedCalls([*([ranks] if ranks else []), *([stage.ring] if stage else [])])
    return Team(spec, device, ranks, stage, calls)


def build(plan: Plan, team: Team) -> Built:
    """Returns the weights, packed for the plan's kernels and saved if requested. All ranks call it together."""
    options, queues = plan.request.options, queues_of(team.device)
    store = None if options.kv_offload is None else _backing_store(options.kv_offload, team, queues)
    if options.offload is not None:
        return Built(*_streamed(plan, team, options.offload, queues), store)
    return Built(_packed(plan, team), None, store)


def _backing_store(option: KvOffload, team: Team, queues: Queues) -> BackingStore:
    """Returns the backing store that the option asks for. Raises UserError for an unusable folder."""
    ranks = team.ranks
    any_failed = (lambda failed: ranks.agree("the caches", flag=failed)) if ranks else None
    if option.device == "disk":
        return cache_folder(option, team.spec.dtype, any_failed)
    ranks_here = team.calls.gather(node()).count(node())
    return HostMemory(option.slots, any_failed, team.device, queues, ranks_here=ranks_here)


def _begun_save(plan: Plan, team: Team) -> Saving | None:
    """Begins the save that `save_mp_checkpoint_path` requests; None: it requests none."""
    path = plan.request.options.save_mp_checkpoint_path
    return None if path is None else Saving.begin(expanded(path), team.spec, plan.request.hf_config, team.calls.gather)


def _packed(plan: Plan, team: Team) -> ModelWeights:
    """Returns resident weights, which are saved while they are packed if requested."""
    request, consumed, saving = plan.request, plan.consumed, _begun_save(plan, team)
    done_with = _layer_remover(plan, team)
    with saving or nullcontext(), torch.inference_mode(), packing_shown(team.spec) as progress:
        keep = saving.keep if saving else None
        weights = build_weights(team.spec, request.source, team.device, progress, done_with, keep)
        if saving:
            saving.finish(request.generation_config, getattr(request.source, "folder", None))
    if consumed:
        consumed.release("")
    return weights


def _layer_remover(plan: Plan, team: Team) -> Callable[[int], None] | None:
    """Returns a function that removes a packed layer from the passed model; None: the model is kept. All checks are
    here, before the first weight is removed.
    """
    consumed, layers = plan.consumed, team.spec.policy.layers
    if consumed is None:
        return None
    check_weights(team.spec, consumed)
    return lambda layer: consumed.release(f"{layers}.{layer}.")


def _streamed(plan: Plan, team: Team, offload: Offload, queues: Queues) -> tuple[ModelWeights, StreamedLayers | None]:
    """Returns weights with offloaded layers, and the stream of these layers; None: all layers fit."""
    request, spec, gather, device = plan.request, team.spec, team.calls.gather, team.device
    if offload.device == "cpu":
        weights_and_stream = on_host(spec, request.source, offload, gather, device, queues, _layer_remover(plan, team))
        if plan.consumed:
            plan.consumed.release("")
        return weights_and_stream
    saved = prepared(spec, request.source, request.hf_config, offload.path, gather)
    if plan.consumed:
        plan.consumed.release("")
    if (weights := with_experts_on_disk(spec, saved, offload, gather)) is not None:
        return weights, None
    return opened(spec, saved, offload, gather, device, queues)


def _facts(request: Request) -> dict[str, object]:
    """Returns the facts that the ranks of a model have to agree on. For the weights: their origin, or a few numbers."""
    options = request.options.model_dump(exclude={"tensor_parallel", "dtype", "impl"}, mode="json", fallback=str)
    return {
        "dtype": str(request.spec.dtype),
        "options": options,
        "config": config_facts(request.hf_config),
        "weights": getattr(request.source, "origin", None) or fingerprint(request.source),
    }
