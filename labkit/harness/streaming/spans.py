"""What a stream noted of a run, as spans that know their slot and their step."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.harness.overlap import Overlap
from labkit.harness.streaming.records import LayerSpan
from labkit.kernels.layer_stream import StreamSpan

MOST_STEPS = 4  # that are kept, the prompt's pass included


def run_spans(noted: Sequence[StreamSpan], blocks: Sequence[int], slots: int, filled: int) -> tuple[LayerSpan, ...]:
    """The spans of a run's first passes through the layers, by their beginning, and what was read meanwhile for later
    ones.

    noted: of a run that began when all slots were filled and `filled` blocks had been read. blocks: of each layer its
    place in the stream, or -1. The reader reads in turns, and turn t is in slot t % slots; a layer is computed from the
    turn of its block in that pass.
    """
    streamed = sum(block >= 0 for block in blocks)
    first_turn = filled - slots  # that the run uses first
    start = min((span.begin_ns for span in noted if span.kind != "read"), default=0)
    passes = {"wait": 0, "compute": 0}
    turn, seen = filled, dict.fromkeys(passes, 0)
    found = []
    for span in sorted(noted, key=lambda each: each.begin_ns):
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
        found.append(
            LayerSpan(
                kind=span.kind,
                layer=span.layer,
                slot=slot,
                step=step,
                begin_ms=(span.begin_ns - start) / 1e6,
                end_ms=(span.end_ns - start) / 1e6,
            )
        )
    end = max((span.end_ms for span in found if span.kind == "compute" and span.step < MOST_STEPS), default=0.0)
    return tuple(span for span in found if span.begin_ms < end)


def hidden_share(spans: Sequence[LayerSpan]) -> float | None:
    """How much of the shorter of reading and computing ran under the other, in the steps after the prompt: 1: all of
    it. None: there is no whole step, or nothing was read in them.
    """
    steps = sorted({span.step for span in spans if span.kind == "compute" and span.step > 0})
    if not steps:
        return None
    computing = [span for span in spans if span.kind == "compute" and span.step in steps]
    begin, end = _begin_of(spans, steps[0]), max(span.end_ms for span in computing)
    reads = [(span.begin_ms, span.end_ms) for span in spans if span.kind == "read"]
    return Overlap.within(begin, end, reads, [(span.begin_ms, span.end_ms) for span in computing]).hidden


def _begin_of(spans: Sequence[LayerSpan], step: int) -> float:
    return min(span.begin_ms for span in spans if span.kind != "read" and span.step == step)
