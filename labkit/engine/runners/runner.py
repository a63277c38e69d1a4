"""Base class of all runners."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.parallel.pipeline_stage import PipelineStage
from labkit.engine.runners.driving import Found, TextBatch, drive
from labkit.engine.runners.stage_clock import StageClock
from labkit.engine.runners.step import Node, Pending, StepInput
from labkit.kernels.decode_step import StreamedLayers


class Runner:
    """Runs the steps of the layers of a process.

    clock: stage times, for runners that measure them.
    """

    clock: StageClock

    def new_cache(self, capacity: int = 0) -> KVCache:
        """Returns an empty cache, which reserves `capacity` slots per sequence at its first use."""
        raise NotImplementedError

    def begin(self, step: StepInput) -> Pending:
        """Starts a step, which the caller has checked. Steps of different caches may begin before the first is
        collected. Steps of one cache follow each other.
        """
        raise NotImplementedError

    @property
    def reading(self) -> str:
        """The way in which decode steps read the weights, for runners that choose it; else empty."""
        return ""

    @property
    def streamed(self) -> StreamedLayers | None:
        """The offloaded layers, which every step fetches; None: all layers are resident."""
        return None

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The kernels of the latest decode step, in the order of a CUDA graph's nodes; empty without a graph."""
        return ()

    @property
    def pipeline(self) -> PipelineStage | None:
        """The pipeline stage of this process; None: it has all layers."""
        return None

    def decode(self, begin: Callable[[StepInput], Pending], texts: TextBatch) -> Found:
        """Continues texts to their end. `begin` checks each step and passes it to this runner's `begin`."""
        (result,) = drive(begin, [texts.loop()])
        return result

    def shared_call(self, name: str) -> AbstractContextManager[None]:
        """Context of a call that all ranks of the model make. It fails on all of them or on none."""
        return nullcontext()

    def before_generation(self) -> None:
        """Called before the first step of a text."""

    def after_generation(self, tokens: Tensor) -> None:
        """Called with the tokens int64 [B, T] of complete texts, prompt included."""
