"""Record of a model whose layers are read from a file for every step: how near it comes to the disk, and how much of
the shorter of reading and computing the longer one hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import numpy as np
from pydantic import Field

from labkit.harness.environment import Environment
from labkit.harness.overlap import Overlap
from labkit.harness.records import SCHEMA_VERSION, FrozenRecord
from labkit.kernels.layer_stream import StreamSpan
from labkit.statistics import Ratio, ratio


class Overlapped(FrozenRecord):
    """A piece of work of several steps: wall time, and how long was read and computed within it, in milliseconds.

    busy_ms: while at least one of both went on. steps: of the model.
    """

    steps: int
    wall_ms: float
    read_ms: float
    compute_ms: float
    busy_ms: float

    @classmethod
    def of(cls, steps: int, begin_ns: int, end_ns: int, spans: Sequence[StreamSpan]) -> Overlapped:
        """Counts what was done between two times of perf_counter_ns."""
        reads, computed = (
            [(span.begin_ns, span.end_ns) for span in spans if span.kind == kind] for kind in ("read", "compute")
        )
        found = Overlap.within(begin_ns, end_ns, reads, computed)
        read, compute, busy = (length / 1e6 for length in found)
        return cls(steps=steps, wall_ms=(end_ns - begin_ns) / 1e6, read_ms=read, compute_ms=compute, busy_ms=busy)

    @property
    def hidden(self) -> float | None:
        """As of `Overlap`."""
        return Overlap(self.read_ms, self.compute_ms, self.busy_ms).hidden


class StreamRound(FrozenRecord):
    """One prompt and the decode steps behind it, with the disk's rate before, between and after them, in GB/s."""

    disk_gb_s: tuple[float, float, float]
    prompt: Overlapped
    decode: Overlapped


class StreamMeasurement(FrozenRecord):
    """A streamed engine in a process of its own. Bytes are those of one rank.

    streamed_bytes: read for every step, of file_bytes in all. resident_bytes: of the weights in memory and the slots.
    allowed_bytes: what these were allowed. peak_bytes: the most that the process held beyond what imports take.
    reads_per_step: how often a layer was read for a step, on average. cached_bytes: of the file in the page cache in
    the end. ready_s: seconds until the engine was there, the first time, when it packed the weights.
    """

    kind: Literal["stream"] = "stream"
    schema_version: Literal[1] = SCHEMA_VERSION
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
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
    streamed_bytes: int
    resident_bytes: int
    allowed_bytes: int
    peak_bytes: int
    cached_bytes: int | None
    reads_per_step: float
    direct: bool
    ready_s: float
    environment: Environment
    rounds: tuple[StreamRound, ...] = Field(min_length=1)

    def step_ms(self) -> list[float]:
        """Of a decode step, by round."""
        return [each.decode.wall_ms / each.decode.steps for each in self.rounds]

    def floor_ms(self) -> list[float]:
        """What the disk takes for the bytes of a decode step at the rate beside it, by round. The slots were full when
        the steps began, so that their bytes count as read before.
        """
        ahead = self.slots * self.streamed_bytes / self.streamed_layers
        return [
            (self.streamed_bytes - ahead / each.decode.steps) / np.mean(each.disk_gb_s[1:]) / 1e6
            for each in self.rounds
        ]

    def disk_share(self) -> Ratio:
        """The time of the disk over that of a decode step."""
        return ratio(self.floor_ms(), self.step_ms())

    def beside_floor(self) -> float:
        """The time of a decode step, less what was computed while nothing was read, over the time of the disk: the
        median of the rounds.
        """
        alone = [(each.decode.busy_ms - each.decode.read_ms) / each.decode.steps for each in self.rounds]
        times = zip(self.step_ms(), alone, self.floor_ms(), strict=True)
        return float(np.median([(step - computing) / floor for step, computing, floor in times]))

    def hidden(self, phase: Literal["prompt", "decode"]) -> float | None:
        """The part of the shorter of reading and computing that the other hides: the median of the rounds with both. No
        such round: None.
        """
        shares = [getattr(each, phase).hidden for each in self.rounds]
        shares = [share for share in shares if share is not None]
        return float(np.median(shares)) if shares else None
