"""Fourth step of `init_inference`: puts the weights into an engine with the runner of the plan."""

from __future__ import annotations

import copy
from dataclasses import replace

from transformers import PreTrainedModel

from labkit.engine.build import Built, Team
from labkit.engine.engine import DecoderEngine, EncoderEngine, InferenceEngine
from labkit.engine.hf.causal_lm import FusedCausalLM
from labkit.engine.hf.encoder import fused_encoder_model
from labkit.engine.memory.heads_on_host import HostMemory
from labkit.engine.memory.slots import SlotPool
from labkit.engine.plan import Plan
from labkit.engine.runners.layer_range import LayerRange
from labkit.engine.runners.one_call import OneCallRunner
from labkit.engine.runners.pipeline.runner import PipelineRunner
from labkit.engine.runners.runner import Runner
from labkit.engine.runners.staged import StagedRunner
from labkit.engine.runners.watched import RankedRunner, WatchedRunner
from labkit.kernels import gpu


def wrap(plan: Plan, team: Team, built: Built) -> InferenceEngine:
    """Returns the engine of the built weights."""
    request, spec, device = plan.request, team.spec, team.device
    options, weights = request.options, built.weights
    if request.is_encoder:
        injected = fused_encoder_model(request.model, spec, weights, device, consume=plan.consumed is not None)
        return EncoderEngine(injected, options, spec.impl, spec.policy.layers.split(".")[0])
    pool = None
    if spec.impl == "triton":
        memory = built.backing_store if isinstance(built.backing_store, HostMemory) else None
        pool = SlotPool(spec.part.local, plan.kv_dtype, device, memory)
    layer_range = LayerRange(
        spec, weights, device, team.ranks, pool, plan.kv_dtype, built.streamed, built.backing_store
    )
    staged = StagedRunner(layer_range)
    module = FusedCausalLM(request.hf_config, choose_runner(plan, team, staged), staged.layers)
    if isinstance(request.model, PreTrainedModel):
        module.loss_function = request.model.loss_function
    if request.generation_config is not None:
        module.generation_config = copy.deepcopy(request.generation_config)
    return DecoderEngine(module, options, spec.impl)


def choose_runner(plan: Plan, team: Team, staged: StagedRunner) -> Runner:
    """Returns the runner of the steps. Only this function distinguishes implementations, devices and ranks."""
    layer_range, options, ranks = staged.layer_range, plan.request.options, team.ranks
    runner: Runner
    if layer_range.impl == "triton" and ranks is None:
        from labkit.engine.runners.cuda_graph import CudaGraphRunner, GpuDecoder

        resident = not layer_range.once_a_step  # a graph needs weights, keys and values at fixed addresses
        graphs = resident and layer_range.device.type == "cuda" and options.enable_cuda_graph is not False
        decoder = GpuDecoder(
            layer_range.weights,
            replace(gpu.default_launcher(), launched=[]),
            layer_range.device,
            graphs=graphs,
            watched=bool(options.enable_cuda_graph),
            dependent_launch=options.dependent_launch,
            streamed=layer_range.streamed,
        )
        runner = CudaGraphRunner(staged, decoder)
    else:
        fast = OneCallRunner(layer_range) if layer_range.impl == "cpp" else staged
        runner = WatchedRunner(fast, staged) if ranks is None else RankedRunner(fast, staged, team.calls)
    return runner if team.stage is None else PipelineRunner(runner, team.stage, team.calls)
