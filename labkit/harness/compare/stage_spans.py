"""Times of the tokens and of the waiting in a generation on pipeline stages, from the spans of the stages.

With a streamer the batch would pass the stages in one piece, so the spans give the times of the tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch.distributed as dist

from labkit.engine.parallel.pipeline_stage import PipelineSpan, PipelineStage
from labkit.engine.runners.stage_clock import StageTime
from labkit.stages import Stage

BESIDE_LAYERS = {"wait": Stage.RECV, "send": Stage.SEND, "sample": Stage.SAMPLE}


class SpanClock:
    """The spans of this rank's latest generation."""

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
