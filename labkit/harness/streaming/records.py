"""Records of an engine with layers that are read from a disk: one record for each batch size."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from labkit.harness.frozen_record import FrozenRecord
from labkit.statistics import Ratio, Trust, grade, taken_cores
from labkit.statistics.ratios import median_ratio
from labkit.statistics.sequential import EPOCHS, typical_time

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
    def columns(self) -> dict[str, Any]:
        """The fields as columns of a frame. The precision is called `dtype`, as in the frames of other results."""
        return {"dtype" if name == "precision" else name: value for name, value in self.model_dump().items()}

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


class StreamTurn(FrozenRecord):
    """Some decode steps in one go, and the rates that were probed just before and just after it: their means."""

    at_s: float  # end of the turn, since the epoch began
    first_step_ms: float
    step_ms: float  # mean of the other steps
    disk_gb_s: float
    gflop_s: float


class StreamEpoch(FrozenRecord):
    """Turns of an engine whose weights stay in one place."""

    prompts_ms: tuple[float, ...] = Field(min_length=1)  # first tokens
    turns: tuple[StreamTurn, ...] = Field(min_length=1)

    @property
    def step_ms(self) -> float:
        """The median turn."""
        return float(np.median([turn.step_ms for turn in self.turns]))


class BatchPoint(FrozenRecord):
    """Measurement of a batch in epochs, each with a new engine. Older records have whole generations, in which the disk
    was probed before the first and after the last.
    """

    batch: int = Field(ge=1)
    resident_layers: int
    streamed_bytes: int  # read for every step
    ttft_ms: float  # median over epochs; in older records of the median run
    decode_ms: tuple[float, ...] = Field(min_length=1)  # all steps that count; in older records of the median run
    disk_gb_s: tuple[float, float]  # next to the first and to the last turn or run
    gflop_s: tuple[float, float]  # of the processor, next to the first and to the last turn or run
    peak_bytes: int  # beyond the imports
    epochs: tuple[StreamEpoch, ...] = ()  # empty in older records
    runs_ms: tuple[float, ...] = ()  # median step of every run of an older record; empty in the oldest, with one run
    others_cores: float | None = None  # processors that other programs kept busy; None: not sampled
    spans: tuple[LayerSpan, ...] = ()  # of the prompt and the first steps; empty where all layers were resident

    @property
    def step_ms(self) -> float:
        """Time of a step: the centre of the epochs, or the median step of an older record."""
        return self._typical[0]

    @property
    def interval(self) -> Ratio:
        """The 95 % interval of a step's time over epochs or runs, relative to that time: a ratio of 1."""
        return self._typical[1]

    @property
    def _typical(self) -> tuple[float, Ratio]:
        if self.epochs:
            return typical_time([epoch.step_ms for epoch in self.epochs], EPOCHS)
        step_ms = float(np.median(self.decode_ms))
        return step_ms, median_ratio(self.runs_ms or (step_ms,))

    def trust(self, threads: int, cores: int) -> Trust:
        """Trust in the batch's time. threads: of the engine; cores: of the machine."""
        taken = () if self.others_cores is None else (taken_cores(self.others_cores, needed=threads, cores=cores),)
        if self.epochs:
            return grade(self.interval, len(self.epochs), taken_cores=taken, unit="epoch")
        return grade(self.interval, max(1, len(self.runs_ms)), taken_cores=taken)

    @property
    def turns(self) -> tuple[StreamTurn, ...]:
        """The turns of all epochs; none in older records."""
        return tuple(turn for epoch in self.epochs for turn in epoch.turns)

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all sequences per second of decoding."""
        return self.batch * 1e3 / self.step_ms

    @property
    def disk(self) -> float:
        """GB/s of the disk: the median over turns, or the mean of an older record's two probes."""
        return float(np.median([turn.disk_gb_s for turn in self.turns] or self.disk_gb_s))

    @property
    def processor(self) -> float:
        """GFLOP/s of the processor: the median over turns, or the mean of an older record's two probes."""
        return float(np.median([turn.gflop_s for turn in self.turns] or self.gflop_s))

    @property
    def share_of_disk(self) -> float | None:
        """Rate at which steps read their bytes / the disk's rate, median over turns, each with the disk's rate next to
        it; None: nothing was read.
        """
        steps = [(turn.step_ms, turn.disk_gb_s) for turn in self.turns] or [(self.step_ms, self.disk)]
        shares = [self.streamed_bytes / step_ms / 1e6 / disk for step_ms, disk in steps]
        return float(np.median(shares)) if self.streamed_bytes else None


class MemorySample(FrozenRecord):
    """Memory at a moment."""

    second: float  # since the beginning of the watch
    bytes: int  # beyond the imports
    batch: int  # that was loaded and generated
