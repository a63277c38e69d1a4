"""What all runners have in common."""

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
    """One way to run the steps of the layers that a process holds.

    clock: the times of the stages, for runners that stamp them.
    """

    clock: StageClock

    def new_cache(self, capacity: int = 0) -> KVCache:
        """An empty cache that reserves `capacity` slots per sequence when it is first used."""
        raise NotImplementedError

    def begin(self, step: StepInput) -> Pending:
        """Starts a step; the caller has checked it. Steps of several caches may be begun before the first is collected,
        those of one cache follow each other.
        """
        raise NotImplementedError

    @property
    def reading(self) -> str:
        """How decode steps read the weights, for runners that choose it; else empty."""
        return ""

    @property
    def streamed(self) -> StreamedLayers | None:
        """The layers that are fetched in every step; None where all are where they are needed."""
        return None

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The kernels of the latest decode step, in the order of a CUDA graph's nodes; none where there is no graph."""
        return ()

    @property
    def pipeline(self) -> PipelineStage | None:
        """The stage that this process is of a pipeline; None where it has all layers."""
        return None

    def decode(self, begin: Callable[[StepInput], Pending], texts: TextBatch) -> Found:
        """Continues texts to their end, by steps that `begin` checks and hands on to this runner's."""
        (found,) = drive(begin, [texts.loop()])
        return found

    def shared_call(self, name: str) -> AbstractContextManager[None]:
        """Around a call that all ranks of the model make, which fails on all of them or on none."""
        return nullcontext()

    def before_generation(self) -> None:
        """Called before the first step of a text."""

    def after_generation(self, tokens: Tensor) -> None:
        """Called with the tokens int64 [B, T] of finished texts, prompt included."""
