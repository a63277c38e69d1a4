"""The roofline of streaming: from a model's shape, a memory budget and the rates of disk and processor to tokens per
second, for every batch and for every number of layers that stay in memory.

A step reads its streamed layers and computes its rows at the same time, so it takes at least the longer of both:
max(S / D, compute), with S the streamed bytes and D the disk's rate. Computing takes a row 2 FLOPs for each weight, so
that a step is bound by it from r* = F * s / (2 * D) rows on, with F the processor's rate and s the bytes of a stored
weight: more rows hide the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from labkit.engine.offload.footprint import Footprint
from labkit.harness.environment import Environment
from labkit.harness.records import SCHEMA_VERSION, FrozenRecord
from labkit.harness.streaming.records import BatchPoint, StreamCase
from labkit.statistics.trust import QUIET, Doubt, Trust

if TYPE_CHECKING:
    import pandas as pd

DISK, COMPUTE = "disk", "compute"
STEADY = 1.1  # a share of the disk beyond this says that the probe met a slower disk than the steps did
AS_MANY = 1 - 1e-9  # of the most tokens per second: what is left is rounding


class StreamWork(FrozenRecord):
    """What a step has to do, counted from the model's shape.

    bytes_per_weight: of a stored weight in the layers, with its share of the scales. weight_bytes: that a step
    multiplies with, wherever they come from. flops, prompt_flops: of one sequence, in a step and in its prompt.
    """

    bytes_per_weight: float
    weight_bytes: int
    flops: float
    prompt_flops: float


class StreamRates(FrozenRecord):
    """GB/s at which the disk is read, GFLOP/s of all threads at most, and GB/s at which they read the memory (None:
    not known, and left out).
    """

    disk_gb_s: float = Field(gt=0)
    gflop_s: float = Field(gt=0)
    memory_gb_s: float | None = Field(default=None, gt=0)


@dataclass(frozen=True)
class PlannedStep:
    """What a step of so many sequences takes at least, predicted, with so many layers in memory.

    memory_bytes: of weights, slots, cache and workspace.
    """

    batch: int
    resident_layers: int
    streamed_bytes: int
    memory_bytes: int
    disk_ms: float
    compute_ms: float

    @property
    def step_ms(self) -> float:
        return max(self.disk_ms, self.compute_ms)

    @property
    def tokens_per_s(self) -> float:
        """Of all sequences, at most."""
        return self.batch * 1e3 / self.step_ms

    @property
    def bound_by(self) -> str:
        return DISK if self.disk_ms > self.compute_ms else COMPUTE


class StreamingPlan(FrozenRecord):
    """What batch pays for a model in a memory budget: predicted everywhere, and measured where there are `points`."""

    kind: Literal["streaming_plan"] = "streaming_plan"
    schema_version: Literal[1] = SCHEMA_VERSION
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
    case: StreamCase
    environment: Environment
    footprint: Footprint
    work: StreamWork
    rates: StreamRates
    points: tuple[BatchPoint, ...] = ()

    @property
    def memory(self) -> float:
        """Bytes of the budget."""
        return self.case.memory_gb * 1e9

    @property
    def free_rows(self) -> float:
        """r*: rows from which computing a streamed layer takes as long as reading it."""
        return rows_of(self.work.bytes_per_weight, self.rates)

    @property
    def free_batch(self) -> int | None:
        """Sequences from which a step is bound by computing, with as many layers in memory as fit beside them. None:
        one sequence leaves room for all layers, so that nothing is streamed.
        """
        if not self.step(1).streamed_bytes:
            return None
        low, high = 0, 1
        while self.step(high).bound_by == DISK:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.step(middle).bound_by == DISK else (low, middle)
        return high

    @property
    def largest_batch(self) -> int:
        """That fits: DeepSpeed's "max batch"."""
        return self._most(0)

    @property
    def batches(self) -> tuple[int, ...]:
        """1, 2, 4 and so on up to the largest that fits, and that one."""
        return tuple(growing(self.largest_batch))

    @property
    def possible_residents(self) -> tuple[int, ...]:
        """How many layers may stay in memory: as many as leave work for all slots, or all."""
        layers = self.footprint.layers
        return (*range(max(0, layers - self.case.slots - 1) + 1), layers)

    @property
    def trade(self) -> tuple[PlannedStep, ...]:
        """Memory for layers against memory for sequences: for every number of layers that fits beside one sequence,
        the largest batch beside them.
        """
        return tuple(
            self.step(most, resident) for resident in self.possible_residents if (most := self._most(resident))
        )

    @property
    def lowest_latency(self) -> PlannedStep:
        """The quickest step of one sequence."""
        return min((self.step(1, each.resident_layers) for each in self.trade), key=lambda step: step.step_ms)

    @property
    def highest_throughput(self) -> PlannedStep:
        """The most tokens per second, of all numbers of layers in memory and of all batches that fit beside them; of
        several that give as many the smallest batch.
        """
        steps = tuple(self._every_step())
        most = max(step.tokens_per_s for step in steps)
        as_many = (step for step in steps if step.tokens_per_s >= most * AS_MANY)
        return min(as_many, key=lambda step: (step.batch, -step.resident_layers))

    def step(self, batch: int, resident: int | None = None, rates: StreamRates | None = None) -> PlannedStep:
        """A step of `batch` sequences. resident: layers in memory; None: as many as fit, none where not even the slots
        do. rates: others than the plan's own.
        """
        resident = self.residents(batch) if resident is None else resident
        rates = rates or self.rates
        streamed = (self.footprint.layers - resident) * self.footprint.layer
        computing = batch * self.work.flops / rates.gflop_s
        if rates.memory_gb_s is not None:
            context = self.case.prompt_tokens + self.case.new_tokens / 2
            cache = batch * context * self.footprint.kv_per_token
            computing = max(computing, (self.work.weight_bytes + cache) / rates.memory_gb_s)
        return PlannedStep(
            batch=batch,
            resident_layers=resident,
            streamed_bytes=streamed,
            memory_bytes=self._taken(resident) + self._beside(batch),
            disk_ms=streamed / rates.disk_gb_s / 1e6,
            compute_ms=computing / 1e6,
        )

    def first_token_ms(self, batch: int, resident: int | None = None) -> float:
        """What the prompts of `batch` sequences take at least: each layer is read once, however long they are."""
        return max(self.step(batch, resident).disk_ms, batch * self.work.prompt_flops / self.rates.gflop_s / 1e6)

    def residents(self, batch: int) -> int:
        """The most layers that may stay in memory beside so many sequences."""
        room = self.memory - self._beside(batch)
        return max((each for each in self.possible_residents if self._taken(each) <= room), default=0)

    def predicted(self, point: BatchPoint) -> PlannedStep:
        """The least that a measured step could have taken at the rates that were probed beside it."""
        beside = {"disk_gb_s": point.disk, "gflop_s": float(np.mean(point.gflop_s))}
        step = self.step(point.batch, point.resident_layers, self.rates.model_copy(update=beside))
        return replace(step, streamed_bytes=point.streamed_bytes, disk_ms=point.streamed_bytes / point.disk / 1e6)

    @property
    def best_point(self) -> BatchPoint | None:
        """The measured batch with the most tokens per second; None: nothing was measured."""
        return max(self.points, key=lambda point: point.tokens_per_s, default=None)

    @property
    def trust(self) -> Trust:
        """The grade of the measured figures: of every batch, and of the disk and the memory that all stand on."""
        doubts: dict[Doubt, list[str]] = {}
        for point in self.points:
            for doubt in point.trust(self.case.threads, self.environment.cores).doubts:
                doubts.setdefault(doubt, []).append(f"{point.batch:,}")
        of_batches = [
            replace(doubt, why=f"{'batch' if len(batches) == 1 else 'batches'} {', '.join(batches)}: {doubt.why}")
            for doubt, batches in doubts.items()
        ]
        return Trust((*(Doubt(why, (QUIET,)) for why in self._beyond), *of_batches))

    @property
    def _beyond(self) -> list[str]:
        """Figures that cannot be."""
        found = [
            f"batch {point.batch:,} took {point.peak_bytes / 1e9:.3f} GB, more than it was given"
            for point in self.points
            if point.peak_bytes > self.memory
        ]
        if fast := [f"{point.batch:,}" for point in self.points if (point.share_of_disk or 0.0) > STEADY]:
            found.append(
                f"steps of batch {', '.join(fast)} read faster than the probes beside them: the disk was not steady, "
                "so that these shares say little"
            )
        return found

    def to_frame(self) -> pd.DataFrame:
        """A row for each predicted batch, for each number of layers in memory, and for each measured batch, which the
        column `figures` tells apart: "predicted", "trade" or "measured".
        """
        import pandas as pd  # half a second, which is not for every process that measures

        return pd.DataFrame(list(self._rows()))

    def as_dict(self) -> dict[str, Any]:
        """The figures, as `labkit plan-batch --json` shows them."""
        return {
            "case": self.case.model_dump(),
            "rates": self.rates.model_dump(),
            "free_rows": self.free_rows,
            "free_batch": self.free_batch,
            "largest_batch": self.largest_batch,
            "lowest_latency": _plain(self.lowest_latency),
            "highest_throughput": _plain(self.highest_throughput),
            "rows": list(self._rows()),
        }

    def _rows(self) -> Iterator[dict[str, Any]]:
        for batch in self.batches:
            yield {"figures": "predicted"} | _plain(self.step(batch))
        for step in self.trade:
            yield {"figures": "trade"} | _plain(step)
        for point in self.points:
            kept = {"batch", "resident_layers", "streamed_bytes", "ttft_ms"}
            own = {"step_ms": point.step_ms, "tokens_per_s": point.tokens_per_s, "memory_bytes": point.peak_bytes}
            yield {"figures": "measured", **point.model_dump(include=kept), **own, "disk_gb_s": point.disk}

    def _every_step(self) -> Iterator[PlannedStep]:
        for resident in self.possible_residents:
            for batch in growing(self._most(resident)):
                yield self.step(batch, resident)

    def _most(self, resident: int) -> int:
        """The largest batch beside so many layers; 0: not even one sequence."""
        beside_slots = self._taken(resident) - self._taken(0)
        case = self.case
        return self.footprint.most_sequences(self.memory - beside_slots, case.prompt_tokens, case.tokens, case.slots)

    def _taken(self, resident: int) -> int:
        """Bytes of the weights in memory, slots included."""
        layers = self.footprint.layers
        kept = layers if resident == layers else min(resident + self.case.slots, layers)
        return self.footprint.outside + kept * self.footprint.layer

    def _beside(self, batch: int) -> int:
        return self.footprint.beside_weights(batch, self.case.prompt_tokens, self.case.tokens)


def rows_of(bytes_per_weight: float, rates: StreamRates) -> float:
    """r* = F * s / (2 * D)."""
    return rates.gflop_s * bytes_per_weight / (2 * rates.disk_gb_s)


def growing(most: int) -> Iterator[int]:
    """1, 2, 4 and so on, and `most` at last; nothing for 0."""
    batch = 1
    while batch < most:
        yield batch
        batch *= 2
    if most:
        yield most


def _plain(step: PlannedStep) -> dict[str, Any]:
    return asdict(step) | {"step_ms": step.step_ms, "tokens_per_s": step.tokens_per_s, "bound_by": step.bound_by}
