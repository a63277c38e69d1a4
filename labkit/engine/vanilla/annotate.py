"""Names the stages of a vanilla Hugging Face model, so that it lines up with the engine stage by stage.

A hook marks the start or the end of a module, but a stage often spans several modules and the functions between them.
So each hook is a boundary: it ends the previous stage and starts the next, and every moment belongs to one stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from labkit.engine.runners.stage_clock import StageTime
from labkit.engine.vanilla.structure import Boundary, boundaries_of, layers_of
from labkit.models.policy import Policy
from labkit.stages import Phase, Range, Stage, StepRanges, message


class HookClock:
    """Sums up the time between boundaries, and announces each stage to profilers."""

    def __init__(self) -> None:
        self._phase = Phase.PREFILL
        self._current: tuple[Phase, Stage, int | None] | None = None
        self._range: Range
        self._steps = StepRanges()
        self._since_ns = 0
        self._calls: dict[tuple[Phase, Stage, int | None], int] = defaultdict(int)
        self._total_ns: dict[tuple[Phase, Stage, int | None], int] = defaultdict(int)

    def begin_forward(self, phase: Phase) -> None:
        self.end_stage()
        self._phase = phase
        self._steps.begin(phase)
        self.switch(Stage.EMBED)

    def switch(self, stage: Stage, layer: int | None = None) -> None:
        """Marks a boundary: `stage` begins."""
        key = (self._phase, stage, layer)
        if key == self._current:
            return
        self.end_stage()
        self._current = key
        self._calls[key] += 1
        self._range = Range(message(*key)).open()
        self._since_ns = perf_counter_ns()

    def end(self) -> None:
        """Ends the running stage and step, if any."""
        self.end_stage()
        self._steps.end()

    def end_stage(self) -> None:
        """Ends the running stage, if any."""
        if self._current is None:
            return
        self._total_ns[self._current] += perf_counter_ns() - self._since_ns
        self._range.close()
        self._current = None

    def stage_times(self) -> list[StageTime]:
        """Returns the collected times, in the order of first appearance."""
        return [StageTime(*key, self._calls[key], total / 1e6) for key, total in self._total_ns.items()]


@contextmanager
def annotate(model: PreTrainedModel, policy: Policy | None) -> Iterator[HookClock]:
    """Context in which the modules that `policy` names have hooks. The model's results do not change. Without a policy
    the stages come from the structure of the layers: see `labkit.engine.vanilla.structure`.

    The times are the CPU's. SAMPLE lasts from the end of a forward pass until transformers prepares the next one.
    """
    clock = HookClock()

    def before_model(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        clock.begin_forward(Phase.DECODE if _has_past(kwargs) else Phase.PREFILL)

    def mark(module: nn.Module, before: Stage | None, after: Stage | None, layer: int | None = None) -> None:
        if before:
            hooks.append(module.register_forward_pre_hook(lambda *_: clock.switch(before, layer)))
        if after:
            hooks.append(module.register_forward_hook(lambda *_: clock.switch(after, layer)))

    def prepare(*args: Any, **kwargs: Any) -> Any:
        clock.end_stage()
        return type(model).prepare_inputs_for_generation(model, *args, **kwargs)

    hooks: list[RemovableHandle] = [model.register_forward_pre_hook(before_model, with_kwargs=True)]
    modules = dict(model.named_modules())
    try:
        model.prepare_inputs_for_generation = prepare  # type: ignore[method-assign]
        mark(model, None, Stage.SAMPLE)
        for module in _head(model, modules, policy):
            mark(module, Stage.LM_HEAD, None)
        layers = layers_of(model) if policy is None else policy.layers
        for index, layer in enumerate(modules[layers].children() if layers is not None else ()):
            for name, before, after in boundaries_of(layer) if policy is None else _layer_boundaries(policy, layer):
                mark(layer.get_submodule(name), before, after, index)
        yield clock
    finally:
        clock.end()
        vars(model).pop("prepare_inputs_for_generation", None)
        for hook in hooks:
            hook.remove()


def _has_past(kwargs: dict[str, Any]) -> bool:
    """Whether a forward with these arguments continues a text. A cache of states alone does not know its length: with
    such a cache a forward of one token does.
    """
    past = kwargs.get("past_key_values", kwargs.get("cache_params"))
    if past is None:
        return False
    try:
        return bool(past.get_seq_length())
    except (AttributeError, ValueError):
        tokens = kwargs.get("input_ids")
        return tokens is not None and tokens.shape[1] == 1


def _head(model: PreTrainedModel, modules: dict[str, nn.Module], policy: Policy | None) -> list[nn.Module]:
    """The modules with which the stage of the LM head begins."""
    if policy is None:
        head = model.get_output_embeddings()
        return [] if head is None else [head]
    return [modules[name] for name in (policy.final_norm, policy.project_out, policy.head) if name in modules]


def _layer_boundaries(policy: Policy, layer: nn.Module) -> list[Boundary]:
    """Returns modules of the layer ("": the layer itself), each with the stage that begins before it and the stage that
    begins after it.

    The MLP stage begins after the attention's output and includes the first residual, as in the fused region.
    """
    return [
        ("", Stage.QKV, None),
        (policy.qkv[-1], None, Stage.ATTENTION),
        *_mlp_boundaries(policy, layer),
    ]


def _mlp_boundaries(policy: Policy, layer: nn.Module) -> list[Boundary]:
    """The boundaries of an MLP, or of a mixture of experts. transformers computes a shared expert before the others,
    and its gate after them: the gate's time is that of RESIDUAL.
    """
    attended = policy.attn_out, Stage.ATTN_OUT
    names = {name for name, _ in layer.named_modules()}
    if policy.router is None or policy.router not in names:
        down = policy.ff2 if policy.router is None else policy.dense_ff2
        return [(*attended, Stage.MLP), (down, Stage.MLP_OUT, Stage.RESIDUAL)]
    experts = policy.ff2, Stage.EXPERTS, Stage.RESIDUAL
    if not policy.shared_ff2:
        return [(*attended, Stage.ROUTE), experts]
    return [(*attended, Stage.MLP), (policy.shared_ff2, Stage.MLP_OUT, Stage.ROUTE), experts]
