"""Spans of a stream's run, with their slots and steps."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.harness.overlap import Overlap
from labkit.harness.streaming.records import LayerSpan
from labkit.kernels.layer_stream import StreamSpan

MOST_STEPS = 4  # passes that are kept, with the prompt's


def run_spans(noted: Sequence[StreamSpan], blocks: Sequence[int], slots: int, filled: int) -> tuple[LayerSpan, ...]:
    """The spans of a run's first passes through the layers, in order of their beginning, with the reads of that time
    for later passes.

    noted: spans of a run that began when all slots were filled and `filled` blocks had been read.
    blocks: index of each layer in the stream, or -1 for a resident layer.

    The reader reads in turns, and turn t is in slot t % slots. A pass computes a layer from its block's turn.
    """
    streamed = sum(block >= 0 for block in blocks)
    first_turn = filled - slots  # the first turn that the run uses
    start = min((span.begin_ns for span in noted if span.kind != "read"), default=0)
    turn, seen = filled, {"wait": 0, "compute": 0}
    spans = []
    for span in sorted(noted, key=lambda span: span.begin_ns):
        slot: int | None
        if span.kind == "read":
            step, slot = (turn - first_turn) // streamed, turn % slots
            turn += 1
        else:
            per_pass = len(blocks) if span.kind == "compute" else streamed
            step = seen[span.kind] // per_pass
            seen[span.kind] += 1
            block = blocks[span.layer]
            slot = (first_turn + step * streamed + block) % slots if block >= 0 else None
        spans.append(
            LayerSpan(
                kind=span.kind,
                layer=span.layer,
                slot=slot,
                step=step,
                begin_ms=(span.begin_ns - start) / 1e6,
                end_ms=(span.end_ns - start) / 1e6,
            )
        )
    end = max((span.end_ms for span in spans if span.kind == "compute" and span.step < MOST_STEPS), default=0.0)
    return tuple(span for span in spans if span.begin_ms < end)


def hidden_share(spans: Sequence[LayerSpan]) -> float | None:
    """The part of the shorter activity (reading or computing) that the other hides, in the steps after the prompt; 1:
    all of it. None: there is no whole step, or nothing was read.
    """
    computing = [span for span in spans if span.kind == "compute" and span.step > 0]
    if not computing:
        return None
    first_step = min(span.step for span in computing)
    begin = min(span.begin_ms for span in spans if span.kind != "read" and span.step == first_step)
    end = max(span.end_ms for span in computing)
    return Overlap.within(begin, end, ((span.kind, span.begin_ms, span.end_ms) for span in spans)).hidden
