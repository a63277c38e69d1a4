"""Generates batches with the real engine in a memory budget, and probes disk and processor around each batch.

This runs in a process of its own (`labkit.harness.streaming.worker`), so its memory is the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import torch
from pydantic import Field

from labkit.engine.engine import FusedEngine
from labkit.harness.compare.loaded_side import LoadedSide
from labkit.harness.compare.loader import load_side
from labkit.harness.disk import BLOCK, folder_rate_gb_s, read_rate_gb_s
from labkit.harness.environment import read_memory, reset_peak_memory
from labkit.harness.runs import FrozenRecord
from labkit.harness.streaming.memory_watch import MemoryWatch
from labkit.harness.streaming.plan import StreamingPlan
from labkit.harness.streaming.records import BatchPoint, MemorySample
from labkit.harness.streaming.run import slots_filled, streamed_run
from labkit.harness.streaming.spans import run_spans
from labkit.harness.timing import timed_generate
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.memory import return_freed_memory
from labkit.kernels.probe import peak_gflop_s
from labkit.system.others_clock import SHORTEST_S, OthersClock
from labkit.system.progress import Progress
from labkit.weights.precision import precision_of
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource

PROBE_S = 0.2  # seconds of the disk's probe, before and after each point
WARM_UP = 2  # new tokens of the untimed run, in which every layer is compared with its digest


class StreamOrder(FrozenRecord):
    """An order to measure batches of a plan."""

    plan: StreamingPlan
    folder: str  # for the packed weights
    seed: int = 0
    batches: tuple[int, ...] = ()  # as far as they fit; empty: growing batches, until tokens per second stop growing
    rounds: int = Field(default=1, ge=1)  # timed runs of each batch


class StreamFindings(FrozenRecord):
    """Result of an order."""

    points: tuple[BatchPoint, ...]
    memory: tuple[MemorySample, ...]  # from the first batch on


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
            follow(index, len(batches) + 1, f"batch {batch:,}")
            watch.batch = batch
            with _engine(order, source, batch) as side:
                points.append(_point(order, side, batch, watch.before))
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
        offload={"path": order.folder, "resident_gb": resident_bytes / 1e9, "slots": case.slots},
    )
    try:
        yield side
    finally:
        side.model.destroy()
        return_freed_memory()


def _point(order: StreamOrder, side: LoadedSide, batch: int, before: int) -> BatchPoint:
    """The point of a batch, from its timed runs. `before`: bytes that the process held without an engine."""
    assert isinstance(side.model, FusedEngine)
    case, streamed = order.plan.case, side.model.streamed
    shape = (batch, case.prompt_tokens)
    ids = torch.from_numpy(np.random.default_rng(order.seed + 1).integers(0, side.config.vocab_size, shape))
    arguments = side.greedy_arguments(*shape)
    timed_generate(side, ids, **arguments, max_new_tokens=WARM_UP)
    slots_filled(streamed)
    probes = [_probed(order, streamed)]
    others_clock = OthersClock()
    runs = [streamed_run(side, streamed, ids, **arguments, max_new_tokens=case.new_tokens) for _ in range(order.rounds)]
    slots_filled(streamed)
    others_cores = others_clock.lap(SHORTEST_S / 2)
    typical = sorted(runs, key=lambda run: median(run.times.decode_ms))[(len(runs) - 1) // 2]
    probes.append(_probed(order, streamed))
    return BatchPoint(
        batch=batch,
        resident_layers=side.model.model_config.num_layers - (len(streamed.layers) if streamed else 0),
        streamed_bytes=streamed.bytes_per_step if streamed else 0,
        ttft_ms=typical.times.ttft_ms,
        decode_ms=typical.times.decode_ms,
        disk_gb_s=(probes[0][0], probes[1][0]),
        gflop_s=(probes[0][1], probes[1][1]),
        peak_bytes=max(0, read_memory().peak - before),
        runs_ms=tuple(median(run.times.decode_ms) for run in runs),
        others_cores=others_cores,
        spans=run_spans(typical.spans, streamed.blocks, streamed.stream.slots, typical.filled) if streamed else (),
    )


def _probed(order: StreamOrder, streamed: StreamedLayers | None) -> tuple[float, float]:
    """GB/s of the disk, from the streamed file if it is long enough, and GFLOP/s of the processor."""
    case = order.plan.case
    if streamed is not None and streamed.file is not None and streamed.file.stat().st_size >= BLOCK:
        disk = read_rate_gb_s(streamed.file, PROBE_S)
    else:
        disk = folder_rate_gb_s(Path(order.folder), PROBE_S)
    dtype = precision_of(case.precision).dtype
    assert dtype is not None
    return disk, peak_gflop_s(dtype, case.threads)


def typical_rates(points: Sequence[BatchPoint]) -> tuple[float, float]:
    """Medians of the probes of all points: GB/s of the disk, GFLOP/s of the processor."""
    disk = median(rate for point in points for rate in point.disk_gb_s)
    return disk, median(rate for point in points for rate in point.gflop_s)
