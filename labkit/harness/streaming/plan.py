"""The roofline of streaming: tokens per second from a model's shape, a memory budget and the rates of disk and
processor, for every batch and every number of resident layers.

A step reads its streamed layers while it computes its rows, so it takes at least the longer of both:
max(S / D, compute), with S the streamed bytes and D the disk's rate. Computing takes 2 FLOPs per row and weight. So it
is the limit from r* = F * s / (2 * D) rows on, with F the processor's rate and s the bytes of a stored weight: more
rows hide the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from labkit.engine.offload.footprint import Footprint
from labkit.harness.environment import Environment
from labkit.harness.frozen_record import FrozenRecord, ResultRecord
from labkit.harness.streaming.records import BatchPoint, StreamCase
from labkit.statistics.trust import QUIET, Doubt, Trust
from labkit.system.result_table import frame_of

if TYPE_CHECKING:
    import pandas as pd

DISK, COMPUTE = "disk", "compute"
STEADY = 1.1  # a larger share of the disk means that the probe met a slower disk than the steps
AS_MANY = 1 - 1e-9  # rates above this part of the highest rate are equal but for rounding


class StreamWork(FrozenRecord):
    """Work of a step, counted from the model's shape."""

    bytes_per_weight: float  # of a stored weight in the layers, with its share of the scales
    weight_bytes: int  # all weights of a step's multiplications, resident or streamed
    flops: float  # of one sequence in a step
    prompt_flops: float  # of one sequence's prompt


class StreamRates(FrozenRecord):
    """Rates of a machine."""

    disk_gb_s: float = Field(gt=0)
    gflop_s: float = Field(gt=0)  # peak of all threads
    memory_gb_s: float | None = Field(default=None, gt=0)  # read bandwidth of all threads; None: unknown, and ignored


@dataclass(frozen=True)
class PlannedStep:
    """Predicted least times of a step."""

    batch: int
    resident_layers: int
    streamed_bytes: int
    memory_bytes: int  # of weights, slots, KV cache and workspace
    disk_ms: float
    compute_ms: float

    @property
    def step_ms(self) -> float:
        return max(self.disk_ms, self.compute_ms)

    @property
    def tokens_per_s(self) -> float:
        """The most tokens per second of all sequences."""
        return self.batch * 1e3 / self.step_ms

    @property
    def bound_by(self) -> str:
        return DISK if self.disk_ms > self.compute_ms else COMPUTE


class StreamingPlan(ResultRecord):
    """Rates of all batches for a model in a memory budget: predicted, and measured for the batches of `points`."""

    kind: Literal["streaming_plan"] = "streaming_plan"
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
        """r*: the number of rows at which computing a streamed layer takes as long as reading it."""
        return self.rates.gflop_s * self.work.bytes_per_weight / (2 * self.rates.disk_gb_s)

    @property
    def free_batch(self) -> int | None:
        """The fewest sequences for which computing is the limit of a step, with as many resident layers as fit. None:
        with one sequence all layers fit into memory, so nothing is streamed.
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
        """The largest batch that fits: DeepSpeed's "max batch"."""
        return self._most(0)

    @property
    def batches(self) -> tuple[int, ...]:
        """1, 2, 4 and so on, and the largest batch that fits."""
        return tuple(growing(self.largest_batch))

    @property
    def possible_residents(self) -> tuple[int, ...]:
        """Possible numbers of resident layers: all, or few enough that all slots have work."""
        layers = self.footprint.layers
        return (*range(max(0, layers - self.case.slots - 1) + 1), layers)

    @property
    def trade(self) -> tuple[PlannedStep, ...]:
        """Memory for layers against memory for sequences: the largest batch for every number of resident layers that
        leaves room for a sequence.
        """
        return tuple(
            self.step(most, resident) for resident in self.possible_residents if (most := self._most(resident))
        )

    @property
    def lowest_latency(self) -> PlannedStep:
        """The quickest step of one sequence."""
        return min((self.step(1, option.resident_layers) for option in self.trade), key=lambda step: step.step_ms)

    @property
    def highest_throughput(self) -> PlannedStep:
        """The step with the most tokens per second, over all numbers of resident layers and all batches that fit. Equal
        steps: the one with the smallest batch.
        """
        steps = tuple(self._every_step())
        most = max(step.tokens_per_s for step in steps)
        fastest = (step for step in steps if step.tokens_per_s >= most * AS_MANY)
        return min(fastest, key=lambda step: (step.batch, -step.resident_layers))

    def step(self, batch: int, resident: int | None = None, rates: StreamRates | None = None) -> PlannedStep:
        """A step of `batch` sequences. resident: resident layers; None: as many as fit, and 0 where not even the slots
        fit. rates: None: the plan's own.
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
            memory_bytes=self._weight_bytes(resident) + self._sequence_bytes(batch),
            disk_ms=streamed / rates.disk_gb_s / 1e6,
            compute_ms=computing / 1e6,
        )

    def first_token_ms(self, batch: int, resident: int | None = None) -> float:
        """The least time of the prompts of `batch` sequences. Each layer is read once, for prompts of any length."""
        return max(self.step(batch, resident).disk_ms, batch * self.work.prompt_flops / self.rates.gflop_s / 1e6)

    def residents(self, batch: int) -> int:
        """The most resident layers that fit next to `batch` sequences."""
        limit = self.memory - self._sequence_bytes(batch)
        fitting = (count for count in self.possible_residents if self._weight_bytes(count) <= limit)
        return max(fitting, default=0)

    def predicted(self, point: BatchPoint) -> PlannedStep:
        """The least time of a measured step at the typical rates that were probed next to it."""
        return self._predicted(point, point.disk, point.processor)

    def share_of_most(self, point: BatchPoint) -> float:
        """Tokens per second of a measured batch / the most that the rates allow: the median over turns, each with the
        rates probed next to it.
        """
        turns = [(turn.step_ms, turn.disk_gb_s, turn.gflop_s) for turn in point.turns]
        turns = turns or [(point.step_ms, point.disk, point.processor)]
        return float(np.median([self._predicted(point, *rates).step_ms / step_ms for step_ms, *rates in turns]))

    def _predicted(self, point: BatchPoint, disk_gb_s: float, gflop_s: float) -> PlannedStep:
        probed = self.rates.model_copy(update={"disk_gb_s": disk_gb_s, "gflop_s": gflop_s})
        step = self.step(point.batch, point.resident_layers, probed)
        return replace(step, streamed_bytes=point.streamed_bytes, disk_ms=point.streamed_bytes / disk_gb_s / 1e6)

    @property
    def best_point(self) -> BatchPoint | None:
        """The measured batch with the most tokens per second; None without measured batches."""
        return max(self.points, key=lambda point: point.tokens_per_s, default=None)

    @property
    def trust(self) -> Trust:
        """Trust in the measured figures: in every batch, and in the disk and the memory on which all depend."""
        doubts: dict[Doubt, list[str]] = {}
        for point in self.points:
            for doubt in point.trust(self.case.threads, self.environment.cores).doubts:
                doubts.setdefault(doubt, []).append(f"{point.batch:,}")
        batch_doubts = [
            replace(doubt, why=f"{'batch' if len(batches) == 1 else 'batches'} {', '.join(batches)}: {doubt.why}")
            for doubt, batches in doubts.items()
        ]
        return Trust((*(Doubt(why, (QUIET,)) for why in self._impossible), *batch_doubts))

    @property
    def _impossible(self) -> list[str]:
        """Figures that are impossible, in words."""
        sentences = [
            f"batch {point.batch:,} took {point.peak_bytes / 1e9:.3f} GB, more than it was given"
            for point in self.points
            if point.peak_bytes > self.memory
        ]
        if fast := [f"{point.batch:,}" for point in self.points if (point.share_of_disk or 0.0) > STEADY]:
            sentences.append(
                f"steps of batch {', '.join(fast)} read faster than the probes around them: the disk was not steady, "
                "so these shares mean little"
            )
        return sentences

    def to_frame(self) -> pd.DataFrame:
        """A row for each predicted batch, each number of resident layers, and each measured batch. Their column
        `figures` is "predicted", "trade" or "measured". Each row has the machine and the case.
        """
        head = {"machine": self.environment.machine, **self.case.columns}
        return frame_of([head | row for row in self._rows()])

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
            own = {
                "step_ms": point.step_ms,
                "step_ms_low": point.step_ms * point.interval.low,
                "step_ms_high": point.step_ms * point.interval.high,
                "tokens_per_s": point.tokens_per_s,
                "memory_bytes": point.peak_bytes,
                "epochs": len(point.epochs),
                "disk_gb_s": point.disk,
                "share_of_disk": point.share_of_disk,
            }
            yield {"figures": "measured", **point.model_dump(include=kept), **own}

    def _every_step(self) -> Iterator[PlannedStep]:
        for resident in self.possible_residents:
            for batch in growing(self._most(resident)):
                yield self.step(batch, resident)

    def _most(self, resident: int) -> int:
        """The largest batch that fits next to `resident` layers; 0: not even one sequence."""
        resident_bytes = self._weight_bytes(resident) - self._weight_bytes(0)
        case = self.case
        return self.footprint.most_sequences(self.memory - resident_bytes, case.prompt_tokens, case.tokens, case.slots)

    def _weight_bytes(self, resident: int) -> int:
        """Bytes of the weights in memory, with the slots."""
        layers = self.footprint.layers
        kept = layers if resident == layers else min(resident + self.case.slots, layers)
        return self.footprint.outside + kept * self.footprint.layer

    def _sequence_bytes(self, batch: int) -> int:
        return self.footprint.beside_weights(batch, self.case.prompt_tokens, self.case.tokens)


def growing(most: int) -> Iterator[int]:
    """1, 2, 4 and so on, and finally `most`; nothing for 0."""
    batch = 1
    while batch < most:
        yield batch
        batch *= 2
    if most:
        yield most


def _plain(step: PlannedStep) -> dict[str, Any]:
    return asdict(step) | {"step_ms": step.step_ms, "tokens_per_s": step.tokens_per_s, "bound_by": step.bound_by}
