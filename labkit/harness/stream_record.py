"""Record of a model whose layers are read from a file for every step: its share of the disk's rate, and the overlap of
reading and computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from labkit.harness.environment import Environment
from labkit.harness.frozen_record import FrozenRecord, ResultRecord
from labkit.harness.streaming.spans import Overlap
from labkit.kernels.layer_stream import StreamSpan
from labkit.statistics import Ratio, ratio
from labkit.statistics.summaries import median_of


class Overlapped(FrozenRecord):
    """Work of several steps of the model, with its times in milliseconds."""

    steps: int
    wall_ms: float
    read_ms: float
    compute_ms: float
    busy_ms: float  # at least one of reading and computing

    @classmethod
    def of(cls, steps: int, begin_ns: int, end_ns: int, spans: Sequence[StreamSpan]) -> Overlapped:
        """Counts the work between two times of perf_counter_ns."""
        overlap = Overlap.within(begin_ns, end_ns, ((span.kind, span.begin_ns, span.end_ns) for span in spans))
        read, compute, busy = (length / 1e6 for length in overlap)
        return cls(steps=steps, wall_ms=(end_ns - begin_ns) / 1e6, read_ms=read, compute_ms=compute, busy_ms=busy)

    @property
    def hidden(self) -> float | None:
        """As `Overlap.hidden`."""
        return Overlap(self.read_ms, self.compute_ms, self.busy_ms).hidden


class StreamRound(FrozenRecord):
    """One prompt and the decode steps after it."""

    disk_gb_s: tuple[float, float, float]  # rate of the disk before the prompt, after it, and after the steps
    prompt: Overlapped
    decode: Overlapped


class StreamMeasurement(ResultRecord):
    """A streamed engine in a process of its own. Bytes count one rank."""

    kind: Literal["stream"] = "stream"
    name: str
    model: str
    precision: str
    batch: int
    prompt_tokens: int
    threads: int
    slots: int
    layers: int
    streamed_layers: int
    file_bytes: int
    streamed_bytes: int  # of the file, read for every step
    resident_bytes: int  # of the weights in memory and the slots
    allowed_bytes: int  # limit of resident_bytes
    peak_bytes: int  # the most that the process held beyond its imports
    cached_bytes: int | None  # of the file, in the page cache at the end
    reads_per_step: float  # reads of a layer for a step, on average
    direct: bool
    ready_s: float  # seconds until the first engine was ready, with packing the weights
    environment: Environment
    rounds: tuple[StreamRound, ...] = Field(min_length=1)

    def step_ms(self) -> list[float]:
        """Milliseconds of a decode step, by round."""
        return [stream_round.decode.wall_ms / stream_round.decode.steps for stream_round in self.rounds]

    def floor_ms(self) -> list[float]:
        """The disk's least time for the bytes of a decode step, by round, at the rate probed around the steps. The
        slots were full when the steps began, so their bytes do not count.
        """
        ahead = self.slots * self.streamed_bytes / self.streamed_layers
        return [
            (self.streamed_bytes - ahead / stream_round.decode.steps) / np.mean(stream_round.disk_gb_s[1:]) / 1e6
            for stream_round in self.rounds
        ]

    def disk_share(self) -> Ratio:
        """The disk's least time / the time of a decode step."""
        return ratio(self.floor_ms(), self.step_ms())

    def beside_floor(self) -> float:
        """(Time of a decode step - computing while nothing was read) / the disk's least time, median of the rounds."""
        only_computing = [
            (stream_round.decode.busy_ms - stream_round.decode.read_ms) / stream_round.decode.steps
            for stream_round in self.rounds
        ]
        times = zip(self.step_ms(), only_computing, self.floor_ms(), strict=True)
        return float(np.median([(step - computing) / floor for step, computing, floor in times]))

    def hidden(self, phase: Literal["prompt", "decode"]) -> float | None:
        """The part of the shorter activity (reading or computing) that the other hides: the median of the rounds with
        both. None without such a round.
        """
        return median_of(getattr(stream_round, phase).hidden for stream_round in self.rounds)
