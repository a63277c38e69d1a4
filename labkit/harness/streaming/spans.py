"""Spans of a stream's run, with their slots and steps, and the overlap of reading and computing layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from labkit.harness.streaming.records import LayerSpan
from labkit.kernels.layer_stream import StreamSpan

Interval = tuple[float, float]  # (begin, end)
Span = tuple[str, float, float]  # (kind, begin, end), in any unit of time
MOST_STEPS = 4  # passes that are kept, with the prompt's


class Overlap(NamedTuple):
    """How long layers were read and computed."""

    read: float
    compute: float
    busy: float  # at least one of the two

    @classmethod
    def within(cls, begin: float, end: float, spans: Iterable[Span]) -> Overlap:
        """Counts reading and computing between two times; a longer span counts with its part between them. Spans of
        other kinds do not count.
        """
        clipped = [(kind, max(first, begin), min(last, end)) for kind, first, last in spans]
        read, compute = (
            [(first, last) for kind, first, last in clipped if kind == counted and first < last]
            for counted in ("read", "compute")
        )
        return cls(_covered(read), _covered(compute), _covered([*read, *compute]))

    @property
    def hidden(self) -> float | None:
        """The part of the shorter activity (reading or computing) that coincided with the other, 0 to 1. None: nothing
        was read, or nothing computed.
        """
        shorter = min(self.read, self.compute)
        if shorter <= 0:
            return None
        return min(1.0, max(0.0, (self.read + self.compute - self.busy) / shorter))  # rounding may pass 0 or 1


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


def _covered(intervals: Sequence[Interval]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total
