"""Traces without stages: work of several kinds on two ranks; a gap, with the call of the CPU in it; ranks that meet in
all-reduces, each with its own clock.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
from helpers.traces.handmade import Recorder, disorder

from labkit.nsys.trace import Trace

TRANSFER_US = 50.0
TRUE_OFFSETS_US = (0.0, 5000.0, -1234.5)  # to be added to the times of each rank


def mixed(seed: int) -> Trace:
    """Two ranks whose operations are kernels, NCCL's kernels and copies, on several streams at once."""
    trace = disorder(seed, ranks=2)
    random = np.random.default_rng(seed)
    copied = random.random(len(trace.operations)) < 0.3
    kind = trace.operations["kind"].astype("str").where(~copied, "memcpy").astype("category")
    return replace(trace, operations=trace.operations.assign(kind=kind))


def waiting(call: str, start: float, end: float, *, kind: str = "api") -> Trace:
    """A kernel until 20 µs, and the next one launched at 100 µs. The launching thread is in `call` for a while."""
    recorder = Recorder()
    recorder.range("batch", 0, 200, domain="")
    recorder.kernel(5, 10, 20, name="first")
    recorder.kernel(100, 105, 120, name="second")
    recorder.kernel(101, 122, 130, name="third")
    trace = recorder.trace()
    times = {"start_ns": round(start * 1e3), "end_ns": round(end * 1e3), "process": 0, "tid": 1}
    added = pd.DataFrame([{**times, "kind": kind, "name": call, "correlation": 0, "external": 0, "inputs": ""}])
    calls = pd.concat([trace.calls.astype({"kind": str, "name": str, "inputs": str}), added])
    calls = calls.astype({"kind": "category", "name": "category", "inputs": "category"})
    return replace(trace, calls=calls.sort_values("start_ns", ignore_index=True))


def exchange(
    arrivals_us: np.ndarray,
    *,
    offsets_us: tuple[float, ...] = TRUE_OFFSETS_US,
    lost: tuple[int, int] | None = None,
    jitter_us: float = 0.5,
    told: bool = False,
    name: str = "ncclDevKernel_AllReduce_Sum_f16",
) -> Trace:
    """Ranks that meet in all-reduces. `arrivals_us` has true times by collective and rank; the times of a rank rise by
    more than a transfer. `lost` is a collective and the rank whose trace lacks it.
    """
    random, recorder = np.random.default_rng(3), Recorder()
    for number, arrivals in enumerate(arrivals_us):
        end = arrivals.max() + TRANSFER_US
        for rank, start in enumerate(arrivals[: len(offsets_us)]):
            if lost == (number, rank):
                continue
            start, stop = start - offsets_us[rank], end + random.uniform(0, jitter_us) - offsets_us[rank]
            description = {"name": "allreduce", "group": "0", "size": 3, "dtype": "Half", "in_elements": 1 << 20}
            columns = {"collective": json.dumps(description)} if told else {}
            recorder.range(f"layer.{number}", start - 5, start - 1, process=rank, domain="")
            recorder.kernel(start - 4, start, stop, name=name, process=rank, **columns)
    trace = recorder.trace(ranks=range(len(offsets_us)))
    files = tuple(f"rank{rank}.json" for rank in range(len(offsets_us)))
    if told:
        operations = trace.operations.assign(collective=trace.operations["collective"].astype("category"))
        trace = replace(trace, operations=operations)
    return replace(trace, source=replace(trace.source, files=files))


def steps(count: int = 40, late: int = 1, by_us: float = 30.0, spread_us: float = 10.0) -> np.ndarray:
    """True arrivals of three ranks; rank `late` comes last every time."""
    random = np.random.default_rng(7)
    arrived = 10_000 + 200.0 * np.arange(count)[:, None] + random.uniform(0, spread_us, (count, 3))
    arrived[:, late] += by_us
    return arrived
