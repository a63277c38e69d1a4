"""Records of an engine with layers that are read from a disk: one record for each batch size."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from labkit.harness.runs import FrozenRecord
from labkit.statistics import Trust, grade, taken_cores
from labkit.statistics.ratios import median_ratio

SpanKind = Literal["read", "wait", "compute"]


class StreamCase(FrozenRecord):
    """A generation in a memory budget."""

    model: str
    origin: str
    precision: str
    memory_gb: float = Field(gt=0)  # 1e9 bytes, for weights, slots, KV cache and workspace together
    prompt_tokens: int = Field(ge=1)
    new_tokens: int = Field(ge=2)
    slots: int = Field(ge=2)  # streamed layers that are in memory at a time
    threads: int = Field(ge=1)  # that compute; one more thread reads

    @property
    def tokens(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt_tokens + self.new_tokens

    @property
    def title(self) -> str:
        """The case in a line."""
        return (
            f"{self.model}, {self.precision}, in {self.memory_gb:g} GB: {self.prompt_tokens} + {self.new_tokens} tokens"
        )


class LayerSpan(FrozenRecord):
    """Reading, waiting for or computing a layer."""

    kind: SpanKind
    layer: int
    slot: int | None  # of the layer; None: the layer is resident
    step: int  # pass through the layers, 0 for the prompt's; of a read, the pass that uses it
    begin_ms: float  # from the first pass on
    end_ms: float


class BatchPoint(FrozenRecord):
    """Measurement of a batch."""

    batch: int = Field(ge=1)
    resident_layers: int
    streamed_bytes: int  # read for every step
    ttft_ms: float  # of the median run
    decode_ms: tuple[float, ...] = Field(min_length=1)  # of the median run
    disk_gb_s: tuple[float, float]  # probed just before and just after the runs
    gflop_s: tuple[float, float]  # of the processor, probed just before and just after the runs
    peak_bytes: int  # beyond the imports
    runs_ms: tuple[float, ...] = ()  # median step of every run; empty in older records, which have one run
    others_cores: float | None = None  # processors that other programs kept busy; None: not sampled
    spans: tuple[LayerSpan, ...] = ()  # of the prompt and the first steps; empty where all layers were resident

    @property
    def step_ms(self) -> float:
        """The median step."""
        return float(np.median(self.decode_ms))

    def trust(self, threads: int, cores: int) -> Trust:
        """Trust in the batch's time. threads: of the engine; cores: of the machine."""
        runs = self.runs_ms or (self.step_ms,)
        taken = () if self.others_cores is None else (taken_cores(self.others_cores, needed=threads, cores=cores),)
        return grade(median_ratio(runs), len(runs), taken_cores=taken)

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all sequences per second of decoding."""
        return self.batch * 1e3 / self.step_ms

    @property
    def disk(self) -> float:
        """Mean GB/s of the disk around this point."""
        return float(np.mean(self.disk_gb_s))

    @property
    def share_of_disk(self) -> float | None:
        """Rate at which steps read their bytes / the disk's rate; None: nothing was read."""
        return self.streamed_bytes / self.step_ms / 1e6 / self.disk if self.streamed_bytes else None


class MemorySample(FrozenRecord):
    """Memory at a moment."""

    second: float  # since the beginning of the watch
    bytes: int  # beyond the imports
    batch: int  # that was loaded and generated
