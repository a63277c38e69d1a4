"""Generates batches with the real engine in a memory budget, in epochs of turns with probes of disk and processor.

This runs in a process of its own (`labkit.harness.streaming.worker`), so its memory is the engine's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import torch
from pydantic import Field

from labkit.engine.engine import FusedEngine
from labkit.harness.compare.loaded_side import LoadedSide
from labkit.harness.compare.loader import load_side
from labkit.harness.disk import BLOCK, folder_rate_gb_s, read_rate_gb_s
from labkit.harness.environment import read_memory, reset_peak_memory
from labkit.harness.frozen_record import FrozenRecord
from labkit.harness.streaming.epoch import MeasuredEpoch, Rates, measure_epoch
from labkit.harness.streaming.plan import StreamingPlan
from labkit.harness.streaming.records import BatchPoint, LayerSpan, MemorySample
from labkit.harness.streaming.spans import run_spans
from labkit.harness.timing import timed_generate
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.memory import return_freed_memory
from labkit.kernels.probe import peak_gflop_s
from labkit.statistics.summaries import median_of
from labkit.system.others_clock import SHORTEST_S, OthersClock
from labkit.system.progress import Progress
from labkit.weights.precision import precision_of
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource

WATCHED_EVERY_S = 0.05
PROBE_S = 0.1  # seconds of the disk's probe, between two turns
WARM_UP = 2  # new tokens of the untimed run, in which every layer is compared with its digest


class StreamOrder(FrozenRecord):
    """An order to measure batches of a plan."""

    plan: StreamingPlan
    folder: str  # for the packed weights
    seed: int = 0
    batches: tuple[int, ...] = ()  # as far as they fit; empty: growing batches, until tokens per second stop growing
    rounds: int = Field(default=1, ge=1)  # epochs of each batch


class StreamFindings(FrozenRecord):
    """Result of an order."""

    points: tuple[BatchPoint, ...]
    memory: tuple[MemorySample, ...]  # from the first batch on


class MemoryWatch:
    """A context in which a thread samples the memory of this process every 50 ms.

    batch: the batch of the samples from now on.
    before: bytes that the process held at the beginning; the samples do not count them.
    """

    def __init__(self) -> None:
        return_freed_memory()
        self.before, self.batch, self.samples = read_memory().now, 0, list[MemorySample]()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="labkit-memory")

    def __enter__(self) -> Self:
        self._begun = perf_counter()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(WATCHED_EVERY_S):
            taken = max(0, read_memory().now - self.before)
            self.samples.append(MemorySample(second=perf_counter() - self._begun, bytes=taken, batch=self.batch))


def measure(order: StreamOrder, follow: Progress) -> StreamFindings:
    """Generates with one batch after the other, and reports each to `follow`."""
    plan, points = order.plan, list[BatchPoint]()
    batches = [batch for batch in order.batches or plan.batches if batch <= plan.largest_batch]
    torch.set_num_threads(plan.case.threads)
    source = resolve(plan.case.model, seed=order.seed)
    follow(0, len(batches) + 1, "packing the weights, once")
    with _engine(order, source, batches[0]):
        pass
    with MemoryWatch() as watch:
        for index, batch in enumerate(batches, start=1):
            watch.batch = batch
            epochs = []
            for number in range(order.rounds):
                label = f"batch {batch:,}, epoch {number + 1} of {order.rounds}"
                follow(index + number / order.rounds, len(batches) + 1, label)
                with _engine(order, source, batch) as side:
                    epochs.append(_epoch(order, side, batch, watch.before))
            points.append(_point(batch, epochs))
            if not order.batches and not _still_grows(points):
                break
    return StreamFindings(points=tuple(points), memory=tuple(watch.samples))


def _still_grows(points: Sequence[BatchPoint]) -> bool:
    """Whether the latest batch gave more tokens per second than every batch before it."""
    return points[-1].tokens_per_s > max((point.tokens_per_s for point in points[:-1]), default=0.0)


@contextmanager
def _engine(order: StreamOrder, source: ModelSource, batch: int) -> Iterator[LoadedSide]:
    """The engine with the most resident layers that fit next to this batch."""
    plan, case = order.plan, order.plan.case
    resident_bytes = plan.footprint.for_weights(plan.memory, batch, case.prompt_tokens, case.tokens, case.slots)
    reset_peak_memory()
    side = load_side(
        f"fused:{case.precision}",
        source,
        torch.float32,
        case.threads,
        impl="cpp",
        offload={"path": order.folder, "resident_gb": resident_bytes / 1e9, "slots": case.slots, "experts": False},
    )
    try:
        yield side
    finally:
        side.model.destroy()
        return_freed_memory()


class _BatchEpoch(NamedTuple):
    """An epoch of a batch, with facts of its engine."""

    measured: MeasuredEpoch
    resident_layers: int
    streamed_bytes: int  # of a step
    peak_bytes: int
    others_cores: float | None
    spans: tuple[LayerSpan, ...]


def _epoch(order: StreamOrder, side: LoadedSide, batch: int, before: int) -> _BatchEpoch:
    """An epoch of a fresh engine. `before`: bytes that the process held without an engine."""
    assert isinstance(side.model, FusedEngine)
    case, streamed = order.plan.case, side.model.streamed
    shape = (batch, case.prompt_tokens)
    ids = torch.from_numpy(np.random.default_rng(order.seed + 1).integers(0, side.config.vocab_size, shape))
    arguments = side.arguments(*shape)
    timed_generate(side, ids, **arguments, max_new_tokens=WARM_UP)
    others_clock = OthersClock()
    measured = measure_epoch(
        lambda streamer: side.generate(ids, streamer=streamer, **arguments, max_new_tokens=case.new_tokens),
        streamed,
        case.new_tokens,
        _probe(order, streamed),
    )
    return _BatchEpoch(
        measured=measured,
        resident_layers=side.model.model_config.num_layers - (len(streamed.layers) if streamed else 0),
        streamed_bytes=streamed.bytes_per_step if streamed else 0,
        peak_bytes=max(0, read_memory().peak - before),
        others_cores=others_clock.lap(SHORTEST_S / 2),
        spans=run_spans(measured.spans, streamed.blocks, streamed.stream.slots, measured.filled) if streamed else (),
    )


def _point(batch: int, epochs: Sequence[_BatchEpoch]) -> BatchPoint:
    """The point of a batch, from its epochs."""
    records = tuple(epoch.measured.record for epoch in epochs)
    turns = [turn for record in records for turn in record.turns]
    typical = sorted(epochs, key=lambda epoch: epoch.measured.record.step_ms)[(len(epochs) - 1) // 2]
    return BatchPoint(
        batch=batch,
        resident_layers=typical.resident_layers,
        streamed_bytes=typical.streamed_bytes,
        ttft_ms=median(median(record.prompts_ms) for record in records),
        decode_ms=tuple(step for epoch in epochs for step in epoch.measured.decode_ms),
        disk_gb_s=(turns[0].disk_gb_s, turns[-1].disk_gb_s),
        gflop_s=(turns[0].gflop_s, turns[-1].gflop_s),
        peak_bytes=max(epoch.peak_bytes for epoch in epochs),
        epochs=records,
        others_cores=median_of(epoch.others_cores for epoch in epochs),
        spans=typical.spans,
    )


def _probe(order: StreamOrder, streamed: StreamedLayers | None) -> Callable[[], Rates]:
    """A probe of the disk, by the streamed file, and of the processor. If the file is missing or too short to be read
    for a while, the rate of its folder's disk is measured once, because that writes a file.
    """
    case, file = order.plan.case, None if streamed is None else streamed.file
    dtype = precision_of(case.precision).dtype
    assert dtype is not None
    if file is not None and file.stat().st_size >= BLOCK:
        return lambda: Rates(read_rate_gb_s(file, PROBE_S), peak_gflop_s(dtype, case.threads))
    folder_gb_s = folder_rate_gb_s(Path(order.folder), PROBE_S)
    return lambda: Rates(folder_gb_s, peak_gflop_s(dtype, case.threads))


def typical_rates(points: Sequence[BatchPoint]) -> Rates:
    """Medians of the rates next to all turns of all points."""
    turns = [turn for point in points for turn in point.turns]
    return Rates(median(turn.disk_gb_s for turn in turns), median(turn.gflop_s for turn in turns))
