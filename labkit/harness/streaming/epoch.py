"""An epoch of a streamed engine: turns of a few steps, with probes of the disk and of the processor between them.

The rate of a shared disk changes within seconds, so each turn is judged by the probes just before and just after it.
The first step of a turn does not count, because the slots were filled during the pause before it.

Batches do not take turns with each other, since memory does not hold the engines of two. Each epoch has an engine of
its own, whose resident layers and slots thus lie in new memory. A copy of them, as `labkit.harness.turns.placing` makes
it, would take more memory than the plan allows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from statistics import fmean
from time import monotonic
from typing import Any, NamedTuple

from labkit.harness.streaming.records import StreamEpoch, StreamTurn
from labkit.harness.timing import collector_paused
from labkit.harness.turns.looks import FEWEST_STEPS, epoch_goes_on, next_steps, usual_steps
from labkit.harness.turns.turn_streamer import GO_ON, LeftError, TurnStreamer
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.layer_stream import LayerStream, StreamSpan

FEWEST_TURNS = 2  # of an epoch; each is an average over many reads
LEAVE: dict[str, Any] = {"op": "leave"}  # the request at which a paused generation ends


class Rates(NamedTuple):
    """Probed rates of the machine."""

    disk_gb_s: float
    gflop_s: float


class MeasuredEpoch(NamedTuple):
    """An epoch, its steps without the first step of each turn, and the spans of its stream in the first prompt and in
    the turn that follows without a pause.
    """

    record: StreamEpoch
    decode_ms: tuple[float, ...]
    spans: tuple[StreamSpan, ...]  # empty if all layers are resident
    filled: int  # blocks that had been read before


def measure_epoch(
    generate: Callable[[TurnStreamer], object],
    streamed: StreamedLayers | None,
    new_tokens: int,
    probe: Callable[[], Rates],
) -> MeasuredEpoch:
    """Generates until there are enough turns.

    - generate: generates `new_tokens` tokens with a streamer.
    - streamed: the engine's; None if all layers are resident.
    - probe: is called while nothing is read and nothing is computed.
    """
    filled = slots_filled(streamed)
    epoch = _Epoch(streamed, new_tokens, probe)
    with collector_paused():
        while epoch.goes_on:
            with suppress(LeftError):
                generate(epoch.streamer())
    record = StreamEpoch(prompts_ms=tuple(epoch.prompts_ms), turns=tuple(epoch.turns))
    return MeasuredEpoch(record, tuple(epoch.decode_ms), epoch.spans, filled)


class _Epoch:
    """Answers the turns of one generation after the other."""

    def __init__(self, streamed: StreamedLayers | None, new_tokens: int, probe: Callable[[], Rates]) -> None:
        self._stream = None if streamed is None else streamed.stream
        self._new, self._probe = new_tokens, probe
        self.prompts_ms: list[float] = []
        self.turns: list[StreamTurn] = []
        self.decode_ms: list[float] = []
        self.spans: tuple[StreamSpan, ...] = ()
        self._steps_per_turn = 0  # not known yet
        self._before = probe()
        self._started = monotonic()

    @property
    def goes_on(self) -> bool:
        return epoch_goes_on(len(self.turns), self._started, FEWEST_TURNS)

    def streamer(self) -> TurnStreamer:
        """The streamer of the next generation."""
        self._left, self._in_prompt = self._new - 1, True
        return TurnStreamer(self._exchange)

    def _exchange(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Notes a turn, and says how the generation goes on."""
        if self._in_prompt:
            self._in_prompt = False
            self.prompts_ms += turn["steps_ms"]
        else:
            self._note(turn["steps_ms"])
            if not self._left or not self.goes_on:
                return LEAVE
        steps = next_steps(self._left, self._steps_per_turn or FEWEST_STEPS)
        self._left -= steps
        return {"op": GO_ON, "tokens": steps}

    def _note(self, steps_ms: list[float]) -> None:
        counted = steps_ms[1:] or steps_ms  # the only step of a short generation counts
        at_s = monotonic() - self._started
        if isinstance(self._stream, LayerStream):
            self._stream.rest()
            self.spans = self.spans or tuple(self._stream.take_spans())
        after = self._probe()
        self.decode_ms += counted
        self.turns.append(
            StreamTurn(
                at_s=round(at_s, 3),
                first_step_ms=steps_ms[0],
                step_ms=fmean(counted),
                disk_gb_s=fmean((self._before.disk_gb_s, after.disk_gb_s)),
                gflop_s=fmean((self._before.gflop_s, after.gflop_s)),
            )
        )
        self._before = after
        if not self._steps_per_turn:
            self._steps_per_turn = usual_steps(min(counted))


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
