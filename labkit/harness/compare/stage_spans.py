"""What the spans of a pipeline's stages say of a generation: when its tokens were there, and who waited how long.

A streamer would take the batch through the stages in one piece, so the times of tokens are those of their spans.
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
        """When all rows had their first token, their second, and so on, perf_counter_ns: on all ranks what the last one
        noted. All of them call it, after a generation, and on one machine.
        """
        self._spans = self._stage.take_spans()
        said = [ends_of_tokens(self._spans)]
        dist.broadcast_object_list(said, src=dist.get_world_size() - 1)
        return said[0]

    def beside_layers(self) -> list[StageTime]:
        """What this rank did beside computing: waiting, sending, choosing tokens."""
        return times_beside_layers(self._spans)


def ends_of_tokens(spans: Sequence[PipelineSpan]) -> list[int]:
    """When the last of the micro-batches had its token, by token."""
    ends: defaultdict[int, int] = defaultdict(int)
    for span in spans:
        if span.kind == "sample":
            ends[span.step] = max(ends[span.step], span.end_ns)
    return [ends[step] for step in sorted(ends)]


def times_beside_layers(spans: Sequence[PipelineSpan]) -> list[StageTime]:
    """The sums of spans that are no computing, by phase and kind."""
    kinds = dict.fromkeys((span.phase, span.kind) for span in spans if span.kind in BESIDE_LAYERS)
    found = []
    for phase, kind in kinds:
        took = [span.end_ns - span.begin_ns for span in spans if (span.phase, span.kind) == (phase, kind)]
        found.append(StageTime(phase, BESIDE_LAYERS[kind], None, len(took), sum(took) / 1e6))
    return found
