"""Base class of all runners."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import final

from torch import Tensor

from labkit.engine.memory.keeping import KeptOnError
from labkit.engine.parallel.pipeline_stage import PipelineStage
from labkit.engine.runners.checks import check_reach, check_step
from labkit.engine.runners.driving import Generated, TextBatch, drive
from labkit.engine.runners.layer_range import LayerRange
from labkit.engine.runners.long_texts import choose_rotation
from labkit.engine.runners.stage_clock import StageClock
from labkit.engine.runners.step import CollectedLater, Node, Pending, StepInput, StepOutput
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.expert_store import ExpertStore


@dataclass(frozen=True)
class RunnerInfo:
    """How a runner runs its steps."""

    streamed: StreamedLayers | None = None  # offloaded layers, which every step fetches; None: all are resident
    expert_store: ExpertStore | None = None  # of offloaded experts, which steps fetch by need; None: all are resident
    reading: str = ""  # how decode steps read the weights, for runners that choose it
    nodes: tuple[Node, ...] = ()  # kernels of the latest decode step, in the order of a CUDA graph's nodes
    pipeline: PipelineStage | None = None  # stage of this process; None: it has all layers


class Runner:
    """Runs the steps of the layers of a process. A subclass runs them in `_begin`.

    layer_range: the layers, with what their caches need.
    config: of the whole model.
    clock: stage times, for runners that measure them.
    step_times_ms: every step appends its time if this is a list.
    """

    def __init__(self, layer_range: LayerRange, clock: StageClock) -> None:
        self.layer_range, self.config, self.clock = layer_range, layer_range.spec.config, clock
        self.step_times_ms: list[float] | None = None

    @final
    def begin(self, step: StepInput) -> Pending:
        """Begins a step. Its output can be collected later: steps of other caches may begin before. Steps of one cache
        follow each other. Raises ValueError for a step that the model cannot run. A step that fails leaves its cache as
        it was.
        """
        start = perf_counter()
        if self.step_times_ms is not None:
            step = step._replace(ahead=None)
        if step.follows:
            check_reach(step.cache.reach + 1, self.config)
        else:
            check_step(step, self.config)
        choose_rotation(step)
        with KeptOnError(step.cache, visible=step.follows):
            pending = self._begin(step)
        if (times_ms := self.step_times_ms) is None:
            return pending

        def timed() -> StepOutput:
            output = pending.collect()
            times_ms.append((perf_counter() - start) * 1e3)
            return output

        return CollectedLater(timed)

    def _begin(self, step: StepInput) -> Pending:
        """Begins a step that has been checked. Runners call it for their parts of a step."""
        raise NotImplementedError

    @property
    def info(self) -> RunnerInfo:
        """Present state of the runner."""
        return RunnerInfo(self.layer_range.streamed, self.layer_range.weights.expert_store)

    def decode(self, texts: TextBatch) -> Generated:
        """Continues texts to their end."""
        (result,) = drive(self.begin, [texts.loop(alone=True)], used=self.clock.chose)
        return result

    def shared_call(self, name: str) -> AbstractContextManager[None]:
        """Context of a call that all ranks of the model make. It fails on all of them or on none."""
        return nullcontext()

    def before_generation(self) -> None:
        """Called before the first step of a text."""

    def after_generation(self, tokens: Tensor) -> None:
        """Called with the tokens int64 [B, T] of complete texts, prompt included."""
