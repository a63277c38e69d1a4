"""Loader of the engine's sides with resident weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from labkit.engine import init_inference
from labkit.engine.parallel.pipeline_stage import PipelineSpan, PipelineStage
from labkit.engine.runners.stage_clock import StageTime
from labkit.harness.compare.loaded_side import LoadedSide, comparison_device
from labkit.harness.compare.loader import MemoryLoader
from labkit.harness.compare.sides import side_row
from labkit.harness.compare.vanilla_sides import hooked_stages
from labkit.harness.stored_weights import StoredWeights, stored_by
from labkit.kernels import gpu
from labkit.kernels.build import load, unavailable
from labkit.models.level_names import HOOKS
from labkit.stages import Stage
from labkit.system.errors import UserError
from labkit.weights.build import has_codes
from labkit.weights.precision import Precision, precision_of
from labkit.weights.source import ModelSource

BESIDE_LAYERS = {"wait": Stage.RECV, "send": Stage.SEND, "sample": Stage.SAMPLE}


class Fused(MemoryLoader):
    """The engine, in the dtype of the other sides or in a precision of its own."""

    def check_name(self, side: str) -> None:
        _precision(side)

    def check(self, side: str, *, dtype: str, batch: int) -> None:
        if torch.cuda.is_available() and (reason := gpu.unavailable()):
            raise UserError(f"the side {side!r} would not run on the GPU, where the others do: {reason}")

    def check_model(self, side: str, source: ModelSource) -> None:
        if side_row(side).models == "GGUF" and not has_codes(source):
            raise UserError(
                f"got {source.name} for {side!r}, expected a model whose file holds codes, as a GGUF file may"
            )

    def get_ready(self, side: str, dtype: torch.dtype) -> None:
        """Compiles and loads the C++ kernels, if they run on this machine."""
        if comparison_device().type == "cpu" and not unavailable():
            precision = _precision(side)
            load(str((precision and precision.dtype) or dtype).removeprefix("torch."))

    def load(self, side: str, source: ModelSource, dtype: torch.dtype, options: Mapping[str, Any]) -> LoadedSide:
        precision = _precision(side)
        own = {"dtype": dtype} if precision is None else precision.options
        engine = init_inference(source, replace_with_kernel_inject=True, **{**own, **options})

        spans = SpanClock(engine.pipeline) if engine.pipeline else None

        def stage_times(run: Callable[[], object]) -> list[StageTime]:
            engine.stage_times(reset=True)
            run()
            return engine.stage_times() + (spans.beside_layers() if spans else [])

        reason = unavailable() if engine.impl == "reference" else None
        weights = stored_by(engine)
        stored = f", {weights} weights" if isinstance(weights, StoredWeights) else ""
        impl = f"labkit, {engine.kernels}{stored}" + (f" ({reason.partition(':')[0]})" if reason else "")
        stamps = spans.stamps_ns if spans else None
        stages = hooked_stages(engine.module, None) if engine.level == HOOKS else stage_times
        return LoadedSide(side, impl, weights, engine, source.tokenizer, stages, stamps_ns=stamps)


class SpanClock:
    """Times of the tokens and of the waiting in this rank's latest generation on pipeline stages, from the spans of the
    stages. With a streamer the batch would pass the stages in one piece, so the spans give the times of the tokens.
    """

    def __init__(self, stage: PipelineStage) -> None:
        self._stage = stage
        self._spans: Sequence[PipelineSpan] = ()

    def stamps_ns(self) -> list[int]:
        """Times at which all rows had their first token, their second and so on (perf_counter_ns), as the last rank
        noted them. All ranks, on one machine, must call it after a generation.
        """
        self._spans = self._stage.take_spans()
        stamps = [ends_of_tokens(self._spans)]
        dist.broadcast_object_list(stamps, src=dist.get_world_size() - 1)
        return stamps[0]

    def beside_layers(self) -> list[StageTime]:
        """Times of this rank outside of the layers: waiting, sending, choosing tokens."""
        return times_beside_layers(self._spans)


def ends_of_tokens(spans: Sequence[PipelineSpan]) -> list[int]:
    """Time at which the last micro-batch had its token, by token."""
    ends: defaultdict[int, int] = defaultdict(int)
    for span in spans:
        if span.kind == "sample":
            ends[span.step] = max(ends[span.step], span.end_ns)
    return [ends[step] for step in sorted(ends)]


def times_beside_layers(spans: Sequence[PipelineSpan]) -> list[StageTime]:
    """Sums of the spans outside of the layers, by phase and kind."""
    kinds = dict.fromkeys((span.phase, span.kind) for span in spans if span.kind in BESIDE_LAYERS)
    times = []
    for phase, kind in kinds:
        took = [span.end_ns - span.begin_ns for span in spans if (span.phase, span.kind) == (phase, kind)]
        times.append(StageTime(phase, BESIDE_LAYERS[kind], None, len(took), sum(took) / 1e6))
    return times


def _precision(side: str) -> Precision | None:
    """The engine's own precision; None for the dtype of the other sides. UserError for an unknown one."""
    row = side_row(side)
    name = row.precision or (side.removeprefix(row.prefix) if row.prefix else "")
    return precision_of(name) if name else None
