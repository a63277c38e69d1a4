"""Times of a layer's regions on a GPU, where a call from Python and its work on the GPU take different times.

"Eager" is the wall time of successive calls, as a program without a CUDA graph makes them; for small work it is the
time of the launches. A graph that replays the same calls takes only the time of the GPU's work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from labkit.harness.regions.clocks import Samples
from labkit.harness.regions.layer_side import LayerSide
from labkit.harness.regions.sides import GRAPH
from labkit.harness.timing import wait_for_gpu
from labkit.stages import Stage
from labkit.system.rounding import ceil_div

CALLS = 24  # the fewest calls of a region in one sample, so that one wait for the GPU hardly counts
Call = Callable[[], object]


@dataclass
class _Recorder:
    """Keeps the calls of a step by region; its `around` is an argument of `run_layer`."""

    calls: dict[Stage, list[Call]] = field(default_factory=lambda: defaultdict(list))
    region: Stage = Stage.QKV

    def around(self, region: Stage) -> AbstractContextManager[None]:
        self.region = region
        return nullcontext()

    def recording(self, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls[self.region].append(partial(op, *args, **kwargs))
            return op(*args, **kwargs)

        return run


class Graph:
    """Work on the GPU, recorded as a CUDA graph on first use and timed by the GPU's own clock."""

    def __init__(self, run: Call) -> None:
        self.run = run
        self._graph: torch.cuda.CUDAGraph | None = None

    def busy_us(self) -> float:
        """Microseconds from the graph's first kernel to the end of its last."""
        if self._graph is None:
            self._graph = self._recorded()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    def _recorded(self) -> torch.cuda.CUDAGraph:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.inference_mode():
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.run()  # compiles and loads kernels, which a recording can't
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                self.run()
        graph.replay()
        return graph


class GpuCalls:
    """The calls of each region in one step of a side, with their arguments."""

    def __init__(self, side: LayerSide) -> None:
        recorder = _Recorder()
        ops = {name: recorder.recording(op) for name, op in side.ops.items()}
        with torch.inference_mode():
            replace(side, ops=ops).step(recorder.around)
        self.name, self.on_gpu = side.name, side.hidden_NH.is_cuda
        passes = ceil_div(CALLS, len(side.layers)) if self.on_gpu else 1
        self.calls = {region: calls * passes for region, calls in recorder.calls.items()}
        self._graphs = {region: Graph(partial(_run, calls)) for region, calls in self.calls.items()}
        self._warm = {region: Graph(partial(_run, calls[:1] * CALLS)) for region, calls in self.calls.items()}

    def times(self) -> dict[str, Samples]:
        """Nanoseconds of a call of every region: from Python and, on a GPU, in a graph."""
        times = {self.name: {region: [self._eager_ns(calls)] for region, calls in self.calls.items()}}
        if self.on_gpu:
            times[self.name + GRAPH] = {
                region: [round(graph.busy_us() * 1e3 / len(self.calls[region]))]
                for region, graph in self._graphs.items()
            }
        return times

    def warm_times(self) -> dict[str, Samples]:
        """Nanoseconds of the first layer's call, which a graph repeats."""
        if not self.on_gpu:
            return {}
        return {self.name: {region: [round(graph.busy_us() * 1e3 / CALLS)] for region, graph in self._warm.items()}}

    def _eager_ns(self, calls: list[Call]) -> int:
        with torch.inference_mode():
            wait_for_gpu()
            start = perf_counter_ns()
            _run(calls)
            wait_for_gpu()
            return round((perf_counter_ns() - start) / len(calls))


def _run(calls: list[Call]) -> None:
    for call in calls:
        call()
