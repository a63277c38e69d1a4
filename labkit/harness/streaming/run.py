"""One generation of a streamed engine: its times, and what its reader and its processor did meanwhile.

The bench of streaming measures with `streamed_run`, because it counts reads and hidden work over unbroken steps; what
takes turns is in `labkit.harness.streaming.epoch`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import torch

from labkit.harness.timing import Generator, Times, TokenClock, timed_generate
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.layer_stream import LayerStream, StreamSpan

Window = tuple[int, int]  # begin and end, of perf_counter_ns


@dataclass(frozen=True)
class StreamedRun:
    """A prompt, and the decode steps after it."""

    times: Times
    prompt_ns: Window
    decode_ns: Window
    spans: tuple[StreamSpan, ...] = ()  # empty if all layers are resident
    filled: int = 0  # blocks that had been read before the run


@dataclass
class _PausingClock(TokenClock):
    """A clock that calls `pause` after the prompt's token, and leaves this time out of the stamps."""

    pause: Callable[[], object] | None
    stamps_ns: list[int] = field(default_factory=list)
    resumed_ns: int = 0
    paused_ns: int = 0

    def put(self, value: torch.Tensor) -> None:
        if value.ndim == 2:
            return
        now = perf_counter_ns()
        self.stamps_ns.append(now - self.paused_ns)
        if len(self.stamps_ns) == 1:
            if self.pause is not None:
                self.pause()
            self.resumed_ns = perf_counter_ns()
            self.paused_ns = self.resumed_ns - now


def streamed_run(
    generator: Generator,
    streamed: StreamedLayers | None,
    input_ids: torch.Tensor,
    *,
    pause: Callable[[], object] | None = None,
    **generating: Any,
) -> StreamedRun:
    """Generates once, from the moment at which all slots are filled.

    - streamed: the engine's; None if all layers are resident.
    - pause: called between the prompt and the decode steps. Its time does not count.
    """
    filled = slots_filled(streamed)
    clock = _PausingClock(pause)
    times, _ = timed_generate(generator, input_ids, streamer=clock, stamps_ns=lambda: clock.stamps_ns, **generating)
    first, last = clock.stamps_ns[0], clock.stamps_ns[-1] + clock.paused_ns
    begin = first - round(times.ttft_ms * 1e6)
    spans = () if streamed is None else tuple(streamed.stream.take_spans())
    return StreamedRun(times, (begin, first), (clock.resumed_ns, last), spans, filled)


def slots_filled(streamed: StreamedLayers | None) -> int:
    """Waits until the reader has filled all slots for the next step. Returns the number of blocks that it has read, and
    drops earlier spans.
    """
    if streamed is None:
        return 0
    stream = streamed.stream
    assert isinstance(stream, LayerStream)
    stream.rest()
    stream.take_spans()
    return stream.blocks_read
