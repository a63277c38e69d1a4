"""The study of the kernels of one shape: its regions, the ladder, the timeline of a layer, the roofline."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Annotated, Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from labkit.harness.regions.case import IMPLS, layer_case
from labkit.harness.regions.layer_side import LayerSide
from labkit.harness.regions.measure import LayerBench, schedule_of
from labkit.harness.regions.records import LadderMeasurement, LayerRecord, RegionMeasurement
from labkit.harness.regions.sides import FUSED, UNFUSED
from labkit.harness.regions.vocabulary import REGIONS
from labkit.harness.timing import wait_for_gpu
from labkit.kernels.types import float_dtype
from labkit.models.dtypes import DTYPES, dtype_of
from labkit.stages import Phase, message, stage
from labkit.statistics import Trust
from labkit.studies.outcome import Outcome, Study
from labkit.studies.settings import Batch, Model, StudySetting, Threads
from labkit.system.partly import Show, so_far, unseen
from labkit.system.progress import Progress, part_of, unheard

PEAK_SIZE, PEAK_SIZE_ON_GPU = 1024, 8192
PEAK_SECONDS = 0.2
REGIONS_DONE, LADDER_DONE, ALL = 50, 98, 100  # percent of the work: after the regions, after the ladder, at the end


@dataclass(frozen=True)
class Span:
    """A run of a region, or of a torch op within it."""

    lane: str
    region: str
    op: str | None  # None: the region itself
    start_us: float
    took_us: float


@dataclass(frozen=True, repr=False)
class KernelStudy(Study):
    """Result of `study_kernels`."""

    regions: tuple[RegionMeasurement, ...]
    ladder: LadderMeasurement | None  # None: the user stopped the run before
    timeline: tuple[Span, ...]  # of one layer, unfused and fused
    peak_gflop_s: float  # of a large matrix product

    def case(self) -> dict[str, Any]:
        return self.regions[0].case.model_dump()

    @property
    def interrupted(self) -> bool:
        """Whether the user stopped the run before its end."""
        return self.regions[0].interrupted or self.ladder is None or self.ladder.interrupted

    def rows(self) -> list[dict[str, Any]]:
        """A row for each side of each region, and for each rung of the ladder, in microseconds of a layer."""
        measured: dict[str, LayerRecord] = {row.region: row for row in self.regions}
        if self.ladder is not None:
            measured["layer"] = self.ladder
        return [
            {
                "region": region,
                "side": side,
                "median_us": float(np.median(rounds)),
                "least_us": min(rounds),
                "most_us": max(rounds),
                "rounds": len(rounds),
                "epochs": row.count if row.epochs else None,
                "bytes": row.bytes,
                "floor_us": row.floor_us,
                "trustworthy": row.trust.trustworthy,
            }
            for region, row in measured.items()
            for side, rounds in row.rounds_us.items()
        ]

    @property
    def claim(self) -> str:
        """The gain of fusing a layer, with its interval, and the share of the limit; the regions' gains if the run was
        stopped before the whole layer was timed.
        """
        ladder, case = self.ladder, self.regions[0].case
        if ladder is None:
            gains = ", ".join(f"{row.region} {row.gain}" for row in self.regions)
            return f"{case.model}, {case.dtype}, batch {case.batch}: regions fused against unfused torch ops: {gains}"
        reached = ladder.floor_share
        share = "" if reached is None else f", {reached:.0%} of the limit"
        mode = "in the one-call step"
        if case.impl == "triton":
            mode = "in a CUDA graph" if ladder.environment.gpu else "interpreted, so that no time means anything,"
        return (
            f"{case.model}, {case.dtype}, batch {case.batch}: a layer fused {mode} against unfused torch ops: "
            f"{ladder.gain}{share}"
        )

    @property
    def headline(self) -> str:
        """The claim, and its grade."""
        return self._trust.graded(self.claim)

    @property
    def outcome(self) -> Outcome:
        return Outcome.graded(self.claim, self._trust, self.regions[0].environment.machine)

    @property
    def _trust(self) -> Trust:
        """The grade of the layer, else of the first region that is not trustworthy."""
        if self.ladder is not None:
            return self.ladder.trust
        grades = [row.trust for row in self.regions]
        return next((trust for trust in grades if not trust.trustworthy), grades[0])


def study_kernels(
    *,
    model: Model = "gpt2",
    dtype: Annotated[
        str, StudySetting("of the weights: float32, bfloat16, float16 or int8", choices=tuple(DTYPES))
    ] = "float32",
    batch: Batch = 1,
    context: Annotated[int, StudySetting("tokens of each sequence in the KV cache", (1, 65_536))] = 128,
    impl: Annotated[str, StudySetting("of the fused kernels: cpp, or triton on a GPU", choices=IMPLS)] = "cpp",
    threads: Threads = 0,
    rounds: Annotated[
        int, StudySetting("epochs of some rounds; 0: until there is a verdict, half a minute at most", (0, 99))
    ] = 0,
    progress: Progress | None = None,
    show: Show = unseen,
) -> KernelStudy:
    """Measures a decode step through layers of the model's shape, region by region and rung by rung.

    - progress: receives the progress.
    - show: receives the study with the parts that are measured so far.

    An interrupt (Ctrl-C) after two epochs of the regions keeps what was measured.

    UserError as from `layer_case`, and for one epoch.
    """
    schedule_of(rounds or None, None, None)
    follow = progress or unheard
    follow(0, ALL, "building the layers")
    bench = LayerBench(layer_case(model, impl=impl, dtype=dtype, batch=batch, context=context, threads=threads or None))

    of_regions = part_of(follow, 0, REGIONS_DONE, ALL, "regions: ")
    regions = bench.regions(rounds=rounds or None, progress=of_regions)
    show(so_far(KernelStudy, regions=regions))
    ladder = None
    if not regions[0].interrupted:
        with suppress(KeyboardInterrupt):  # the regions are kept
            of_ladder = part_of(follow, REGIONS_DONE, LADDER_DONE, ALL, "one region after another: ")
            ladder = bench.ladder(rounds=rounds or None, progress=of_ladder)
            show(so_far(KernelStudy, regions=regions, ladder=ladder))
    device = bench.stack.sides[0].hidden_NH.device
    study = KernelStudy(regions, ladder, layer_timeline(bench), peak_gflop_s(bench.case.dtype, device))
    follow(ALL, ALL, "done")
    return study


def layer_timeline(bench: LayerBench) -> tuple[Span, ...]:
    """A typical layer of the unfused and of the fused side, from torch.profiler; each starts at 0."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read once; else each profile writes lines to stderr
    return tuple(span for name in (UNFUSED, FUSED) for span in _spans(bench.stack.side(name)))


def peak_gflop_s(dtype: str, device: torch.device) -> float:
    """GFLOP/s of the fastest of several products of square matrices with torch; int8 counts as bfloat16."""
    size = PEAK_SIZE_ON_GPU if device.type == "cuda" else PEAK_SIZE
    a, b = (torch.randn(size, size).to(device, float_dtype(dtype_of(dtype))) for _ in range(2))
    best, until = float("inf"), perf_counter_ns() + PEAK_SECONDS * 1e9
    while perf_counter_ns() < until:
        start = perf_counter_ns()
        torch.mm(a, b)
        wait_for_gpu()
        best = min(best, perf_counter_ns() - start)
    return 2 * size**3 / best


def _spans(side: LayerSide) -> list[Span]:
    """The spans of the layer whose time is the median of all layers in a profiled step."""
    layer = -1

    @contextmanager
    def around(region: Any) -> Iterator[None]:
        nonlocal layer
        layer += region is REGIONS[0]
        with stage(Phase.DECODE, region, layer):
            yield
            wait_for_gpu()  # a GPU's work belongs to the region that started it

    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        side.step(around)
    events = {event.name: event for event in profiler.events() if event.name.startswith(Phase.DECODE)}
    layers = [[events[message(Phase.DECODE, region, index)] for region in REGIONS] for index in range(layer + 1)]
    layers.sort(key=lambda ranges: ranges[-1].time_range.end - ranges[0].time_range.start)
    median_layer = layers[len(layers) // 2]
    start = median_layer[0].time_range.start
    spans = []
    for region, outer in zip(REGIONS, median_layer, strict=True):
        ops = [(event.name.removeprefix("aten::"), event) for event in outer.cpu_children]
        for op, event in [(None, outer), *ops]:
            took = event.time_range.elapsed_us()
            spans.append(Span(side.name, region, op, event.time_range.start - start, took))
    return spans
