"""Traces made by hand: from events in microseconds, or from a description of what each stage of a decode does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from labkit.nsys.trace import Source, Trace, typed
from labkit.stages import DOMAIN, Phase, step_message

LATENCY_US = 2.0  # from the end of a launch to the start of its kernel on an idle GPU


def ns(us: float) -> int:
    return round(us * 1e3)


@dataclass
class Recorder:
    """Collects events; all times are in microseconds. If ranges start together, the last one is the outer."""

    ranges: list[dict[str, Any]] = field(default_factory=list)
    operations: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def range(
        self, name: str, start: float, end: float, *, process: int = 0, tid: int = 1, domain: str = DOMAIN
    ) -> None:
        times = {"start_ns": ns(start), "end_ns": ns(end), "process": process, "tid": tid}
        self.ranges.append({**times, "domain": domain, "name": name, "style": "PushPop"})

    def kernel(
        self, called: float, start: float, end: float, *, name: str = "kernel", process: int = 0, **columns: Any
    ) -> None:
        """Adds a kernel and its launch. Thread 1 launches it within a tenth of a microsecond."""
        correlation = len(self.operations) + 1
        shared = {"process": process, "correlation": correlation}
        self.calls.append(
            {"start_ns": ns(called), "end_ns": ns(called + 0.1), "tid": 1, "kind": "api", "name": "launch", **shared}
        )
        self.operations.append(
            {"start_ns": ns(start), "end_ns": ns(end), "kind": "kernel", "name": name, "stream": 7, **shared, **columns}
        )

    def operator(self, name: str, start: float, end: float, *, process: int = 0, tid: int = 1) -> None:
        times = {"start_ns": ns(start), "end_ns": ns(end), "process": process, "tid": tid}
        self.calls.append({**times, "kind": "op", "name": name})

    def trace(self, *, ranks: Sequence[int] = (-1,), profiler: str = "nsys", skipped: tuple[str, ...] = ()) -> Trace:
        events = {"ranges": self.ranges[::-1], "operations": self.operations, "calls": self.calls}
        frames = {name: _frame(name, rows) for name, rows in events.items()}
        frames["ranges"]["range_id"] = np.arange(len(self.ranges)) + 1
        processes = typed("processes", {"pid": [100 + index for index in range(len(ranks))], "rank": list(ranks)})
        return Trace(Source(profiler, "", ("made.sqlite",), skipped=skipped), **frames, processes=processes)


def _frame(name: str, events: list[dict[str, Any]]) -> pd.DataFrame:
    keys = {key: None for event in events for key in event}
    columns = {key: [event.get(key, 0) for event in events] for key in keys}
    return typed(name, columns).sort_values("start_ns", kind="stable", ignore_index=True)


@dataclass(frozen=True)
class Does:
    """What a stage does in a step. With `kernels` 0 the CPU works alone for `launch_us`."""

    kernels: int = 1
    kernel_us: float = 10.0
    launch_us: float = 4.0  # CPU time for each kernel
    name: str = "kernel"


VANILLA = {
    "embed": Does(2, 3.0),
    "layer.0/qkv": Does(4, 5.0),
    "layer.0/attention": Does(6, 2.0),
    "layer.0/mlp": Does(4, 6.0),
    "layer.0/residual": Does(2, 2.0),
    "lm_head": Does(1, 20.0),
    "sample": Does(3, 1.0, 8.0),
}
FUSED = {
    "embed": Does(1, 4.0),
    "layer.0/qkv": Does(1, 12.0),
    "layer.0/attention": Does(1, 8.0),
    "layer.0/mlp": Does(1, 14.0),
    "lm_head": Does(1, 15.0),
    "sample": Does(1, 1.0, 6.0),
}


def layers(stages: Mapping[str, Does], count: int) -> dict[str, Does]:
    """The same stages with `count` layers."""
    copies = {}
    for name, does in stages.items():
        for layer in range(count if name.startswith("layer.0/") else 1):
            copies[name.replace("layer.0/", f"layer.{layer}/")] = does
    return copies


def slower(stages: Mapping[str, Does], factor: float) -> dict[str, Does]:
    return {
        name: replace(does, kernel_us=does.kernel_us * factor, launch_us=does.launch_us * factor)
        for name, does in stages.items()
    }


def decode(
    stages: Mapping[str, Does],
    *,
    steps: int = 8,
    gpu: bool = True,
    step_ranges: bool = True,
    phase: Phase = Phase.DECODE,
    between_us: float = 0.0,
    first_us: float = 0.0,
    noise: float = 0.0,
    seed: int = 0,
    operators: bool = False,
) -> Trace:
    """Trace of one process. Kernels start in the order of their launches, and the next step waits for the last one.

    `between_us` is CPU time between two stages, and `first_us` is additional time in the first step. `noise` is
    relative to all times. With `operators` there are operators on the CPU instead of kernels, and each fills 90 % of
    its time.
    """
    random, recorder = np.random.default_rng(seed), Recorder()
    cpu = free = 10.0
    for step in range(steps):
        begin = cpu
        cpu += first_us if step == 0 else 0.0
        for name, does in stages.items():
            opened = cpu
            for _ in range(max(does.kernels, 1)):
                launch, runs = np.exp(noise * random.standard_normal(2)) * (does.launch_us, does.kernel_us)
                called, cpu = cpu, cpu + launch + (0.0 if gpu or not does.kernels else runs)
                if gpu and does.kernels:
                    start = max(cpu + LATENCY_US, free)
                    free = start + runs
                    recorder.kernel(called, start, free, name=does.name)
                elif operators and does.kernels:
                    recorder.operator("aten::op", called, called + 0.9 * (cpu - called))
            if name.endswith("sample"):
                cpu = max(cpu, free)
            recorder.range(f"{phase}/{name}", opened, cpu)
            cpu += between_us
        if step_ranges:
            recorder.range(step_message(phase), begin, cpu)
    if step_ranges:
        recorder.range(str(phase), 10.0, cpu)
    return recorder.trace(profiler="torch.profiler" if operators else "nsys")


STAGES = ("embed", "layer.0/qkv", "layer.0/qkv+mlp", "layer.0/mlp", "layer.1/attention", "layer.1/all_reduce", "sample")


def disorder(seed: int, *, steps: int = 6, ranks: int = 1, gpu: bool = True) -> Trace:
    """Trace of random stages with everything that can go wrong: overlap, work outside stages or steps, NCCL work."""
    random, recorder = np.random.default_rng(seed), Recorder()
    for process in range(ranks):
        now = random.uniform(0, 50)
        for _ in range(steps):
            begin = now
            for name in ("embed", *random.choice(STAGES, random.integers(1, 6))):
                now += random.uniform(0, 3) * random.integers(2)
                opened = now
                for _ in range(random.integers(0, 4)):
                    now += random.uniform(0.2, 4)
                    start = now + random.uniform(0, 30)
                    kernel = {
                        "name": random.choice(["kernel", "ncclDevKernel_AllReduce"]),
                        "stream": random.integers(3),
                    }
                    if gpu:
                        recorder.kernel(now - 0.15, start, start + random.exponential(8), process=process, **kernel)
                    else:
                        recorder.operator("aten::op", now - random.uniform(0, 0.2), now, process=process)
                now += random.uniform(0.1, 2)
                if random.random() < 0.9:
                    recorder.range(f"decode/{name}", opened, now, process=process)
            if random.random() < 0.9:
                recorder.range(step_message(Phase.DECODE), begin, now, process=process)
            now += random.uniform(0, 5)
    return recorder.trace(ranks=range(ranks), profiler="nsys" if gpu else "torch.profiler")
