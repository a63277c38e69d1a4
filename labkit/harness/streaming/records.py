"""What was measured of an engine whose layers are read from a disk: one record for each batch size."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from labkit.harness.records import FrozenRecord
from labkit.statistics import Trust, grade, taken_cores
from labkit.statistics.ratios import median_ratio

SpanKind = Literal["read", "wait", "compute"]


class StreamCase(FrozenRecord):
    """What is generated, in how much memory.

    memory_gb: GB (1e9 bytes) for weights, slots, cache and workspace together. slots: layers that are in memory at a
    time of those that are read. threads: that compute; one more reads.
    """

    model: str
    origin: str
    precision: str
    memory_gb: float = Field(gt=0)
    prompt_tokens: int = Field(ge=1)
    new_tokens: int = Field(ge=2)
    slots: int = Field(ge=2)
    threads: int = Field(ge=1)

    @property
    def tokens(self) -> int:
        """Of a sequence at its end."""
        return self.prompt_tokens + self.new_tokens

    @property
    def title(self) -> str:
        """The case in a line."""
        return (
            f"{self.model}, {self.precision}, in {self.memory_gb:g} GB: {self.prompt_tokens} + {self.new_tokens} tokens"
        )


class LayerSpan(FrozenRecord):
    """What was done when with a layer. slot: that it was in; None: it stays in memory. step: which pass through the
    layers it belongs to, 0 for the prompt's; of a read, the one that uses it. Milliseconds from the first pass on.
    """

    kind: SpanKind
    layer: int
    slot: int | None
    step: int
    begin_ms: float
    end_ms: float


class BatchPoint(FrozenRecord):
    """A batch that was generated with so many layers in memory.

    streamed_bytes: read for every step. ttft_ms, decode_ms: of the median run; runs_ms: the median step of every run
    (empty in older records, of one run). others_cores: processors that other programs kept busy around the runs (None:
    nobody looked). disk_gb_s, gflop_s: the rates of the disk and of the processor, probed just
    before and just after. peak_bytes: held at most, beyond what imports take. spans: of the prompt and of the first
    steps; none where everything was in memory.
    """

    batch: int = Field(ge=1)
    resident_layers: int
    streamed_bytes: int
    ttft_ms: float
    decode_ms: tuple[float, ...] = Field(min_length=1)
    disk_gb_s: tuple[float, float]
    gflop_s: tuple[float, float]
    peak_bytes: int
    runs_ms: tuple[float, ...] = ()
    others_cores: float | None = None
    spans: tuple[LayerSpan, ...] = ()

    @property
    def step_ms(self) -> float:
        """The median step."""
        return float(np.median(self.decode_ms))

    def trust(self, threads: int, cores: int) -> Trust:
        """The grade of its time. threads: of the engine; cores: of the machine."""
        runs = self.runs_ms or (self.step_ms,)
        others = () if self.others_cores is None else (taken_cores(self.others_cores, needed=threads, cores=cores),)
        return grade(median_ratio(runs), len(runs), taken_cores=others)

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all sequences per second of decoding."""
        return self.batch * 1e3 / self.step_ms

    @property
    def disk(self) -> float:
        """GB/s beside this point."""
        return float(np.mean(self.disk_gb_s))

    @property
    def share_of_disk(self) -> float | None:
        """The rate at which steps took their bytes from the disk / the disk's own; None: nothing was read."""
        return self.streamed_bytes / self.step_ms / 1e6 / self.disk if self.streamed_bytes else None


class MemorySample(FrozenRecord):
    """Bytes in memory beyond what imports take, so many seconds after the first sample, while this batch was loaded
    and generated.
    """

    second: float
    bytes: int
    batch: int
