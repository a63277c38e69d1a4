"""`labkit kernels` compares each region of a model's layers unfused, fused, and with the limit of the memory."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from labkit.harness.environment import read_environment
from labkit.harness.quiet import OthersByRound, wait_until_quiet
from labkit.harness.regions.case import layer_case, shape_of
from labkit.harness.regions.clocks import Samples
from labkit.harness.regions.counting import region_bytes, region_flops
from labkit.harness.regions.layer_side import LayerSide, OneCall
from labkit.harness.regions.layer_stack import LayerStack, layer_stack
from labkit.harness.regions.on_gpu import GpuCalls, Graph
from labkit.harness.regions.records import LadderMeasurement, LayerCase, RegionMeasurement
from labkit.harness.regions.sides import FUSED, GRAPH, ONE_CALL, OWN_GEMM, SDPA
from labkit.harness.regions.vocabulary import REGIONS, RUNGS, WITH_GEMM
from labkit.harness.results import save_lines
from labkit.harness.roofline import probe_bandwidth
from labkit.harness.rounds import probed, random_orders
from labkit.kernels.build import load
from labkit.models.dtypes import dtype_of
from labkit.stages import FUSED_REGIONS, Stage
from labkit.system.bounds import check_number
from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean
from labkit.system.output_folder import check_output_folder
from labkit.system.progress import Progress, unheard

ROUNDS = 15
NOTHING = nullcontext()
Timer = Callable[[], dict[str, Samples]]
Table = defaultdict[Stage, defaultdict[str, list[float]]]  # microseconds by region and side, one per round


class LayerBench:
    """The layers of a case, built once and timed region by region and rung by rung.

    Raises BuildError where the C++ kernels can't be compiled.
    """

    def __init__(self, case: LayerCase) -> None:
        if case.impl == "cpp":
            load(case.dtype)
        self.case = case
        self.stack = layer_stack(shape_of(case.model), case)

    def regions(
        self, regions: Iterable[str] | None = None, *, rounds: int = ROUNDS, progress: Progress | None = None
    ) -> tuple[RegionMeasurement, ...]:
        """Times regions (None: the four fused regions) of all sides, in random order within each round.

        ValueError for an unknown region, and for fewer than two rounds.
        """
        chosen = _chosen(regions)
        stack, case = self.stack, self.case
        counted = stack.counted()
        sides, warm_sides = self._timers()
        cold: Table = defaultdict(lambda: defaultdict(list))
        warm: Table = defaultdict(lambda: defaultdict(list))

        def one_round(order: Sequence[int]) -> None:
            for side in order:
                _note(cold, sides[side]())

        def after_round() -> None:
            for times in warm_sides:
                _note(warm, times())

        round_fields = self._rounds(len(sides), rounds, one_round, after_round, progress)
        environment = read_environment(case.threads)
        dtype = dtype_of(case.dtype)
        return tuple(
            RegionMeasurement(
                region=region,
                case=case,
                environment=environment,
                ops=tuple(counted[region].ops),
                unfused_bytes=counted[region].bytes,
                bytes=region_bytes(stack.config, region, dtype, case.batch, case.context),
                flops=region_flops(stack.config, region, case.batch, case.context),
                rounds_us=_region_rounds(region, cold[region], rounds),
                warm_us=_region_rounds(region, warm[region], rounds),
                **round_fields,
            )
            for region in chosen
        )

    def ladder(self, *, rounds: int = ROUNDS, progress: Progress | None = None) -> LadderMeasurement:
        """Times whole steps with more and more regions fused, the rungs in random order within each round."""
        stack, case = self.stack, self.case
        fused_steps: list[Callable[[], object]] = [partial(_step, stack.with_fused(fused)) for fused in RUNGS.values()]
        if stack.gpu_step is not None:
            steps = [_gpu_timer(run) for run in (*fused_steps, stack.gpu_step)]
        else:
            steps = [*(partial(_wall_us, run) for run in fused_steps), partial(_stamped_us, stack)]
        names = [*RUNGS, ONE_CALL if stack.gpu_step is None else FUSED + GRAPH]
        samples: dict[str, list[float]] = {name: [] for name in names}

        def one_round(order: Sequence[int]) -> None:
            for rung in order:
                samples[names[rung]].append(steps[rung]() / case.layers)

        round_fields = self._rounds(len(steps), rounds, one_round, lambda: None, progress)
        dtype = dtype_of(case.dtype)
        return LadderMeasurement(
            case=case,
            environment=read_environment(case.threads),
            bytes=sum(region_bytes(stack.config, region, dtype, case.batch, case.context) for region in REGIONS),
            rounds_us={name: tuple(taken[-rounds:]) for name, taken in samples.items()},
            **round_fields,
        )

    def _timers(self) -> tuple[list[Timer], list[Timer]]:
        """Two timers of every side: for a round, and for a layer that stays in the processor's cache."""
        stack = self.stack
        if self.case.impl == "triton":
            calls = [GpuCalls(side) for side in stack.sides]
            return [side_calls.times for side_calls in calls], [side_calls.warm_times for side_calls in calls]
        assert stack.one_call is not None
        cold: list[Timer] = [*(partial(_named, side) for side in stack.sides), partial(_named, stack.one_call)]
        return cold, [partial(_named, side, warm=True) for side in stack.sides]

    def _rounds(
        self,
        sides: int,
        rounds: int,
        one_round: Callable[[Sequence[int]], None],
        after_round: Callable[[], None],
        progress: Progress | None,
    ) -> dict[str, tuple[float, ...] | None]:
        """Runs a warm-up and `rounds` rounds. Returns a record's fields about the machine during these rounds."""
        check_rounds(rounds)
        follow = progress or unheard
        device = self.stack.sides[0].hidden_NH.device
        bandwidth: list[float] = []
        orders, others_by_round = random_orders(sides), OthersByRound()
        for index in range(rounds + 1):
            follow(index, rounds + 1, f"round {index} of {rounds}" if index else "warming up")
            turn = probed(partial(one_round, next(orders)), partial(probe_bandwidth, self.case.threads, device))
            after_round()
            if index and turn.bandwidth_gb_s is not None:
                bandwidth.append(turn.bandwidth_gb_s)
            others_by_round.end_round()
        others_by_round.end()
        follow(rounds + 1, rounds + 1, "done")
        cores = tuple(busy for busy in others_by_round.cores[1:] if busy is not None)
        return {"bandwidth_gb_s": tuple(bandwidth) or None, "others_cores": cores or None}


def measure_regions(
    model: str = "gpt2",
    *,
    regions: Iterable[str] | None = None,
    rounds: int = ROUNDS,
    wait_quiet_s: float | None = None,
    output: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[RegionMeasurement, ...]:
    """Times regions of `layer_case(model, **options)`. `save_regions` writes the records.

    regions: None: the four fused regions.
    wait_quiet_s: wait at most this long until other programs leave the processors alone; None: do not wait.
    output: a folder for the caller's records, checked and made before anything is measured.

    All arguments are checked before anything is waited for or built.
    """
    _chosen(regions)
    check_rounds(rounds)
    case = layer_case(model, **options)
    if output is not None:
        check_output_folder(output)
    if wait_quiet_s is not None:
        wait_until_quiet(wait_quiet_s, needed=case.threads if case.impl == "cpp" else 1, progress=progress)
    return LayerBench(case).regions(regions, rounds=rounds, progress=progress)


def check_rounds(rounds: int) -> None:
    """UserError for fewer rounds than an interval needs."""
    check_number("rounds", rounds, least=2, why="an interval needs two")


def save_regions(rows: Sequence[RegionMeasurement], folder: str | os.PathLike[str]) -> Path:
    """Writes the regions of one bench as a file of JSON lines in `folder`; returns its path. SaveError as `save`."""
    case, created = rows[0].case, rows[0].created
    stem = f"{created:%Y%m%dT%H%M%S%f}-{Path(case.model).name}-{case.dtype}-b{case.batch}-regions"
    return save_lines(Path(folder) / f"{stem}.jsonl", rows)


def _named(side: LayerSide | OneCall, **options: bool) -> dict[str, Samples]:
    return {side.name: side.times(**options)}


def _step(side: LayerSide) -> None:
    side.step(lambda region: NOTHING)


def _gpu_timer(run: Callable[[], object]) -> Callable[[], float]:
    """A timer in microseconds, by the GPU's clock or, in the interpreter, by the wall clock."""
    return Graph(run).busy_us if torch.cuda.is_available() else partial(_wall_us, run)


def _stamped_us(stack: LayerStack) -> float:
    assert stack.one_call is not None
    return sum(map(sum, stack.one_call.times().values())) / 1e3


def _wall_us(run: Callable[[], object]) -> float:
    with torch.inference_mode():
        start = perf_counter_ns()
        run()
        return (perf_counter_ns() - start) / 1e3


def _note(table: Table, samples: dict[str, Samples]) -> None:
    for side, regions in samples.items():
        for region, calls in regions.items():
            table[region][side].append(float(np.median(calls)) / 1e3)


def _region_rounds(region: Stage, sides: dict[str, list[float]], rounds: int) -> dict[str, tuple[float, ...]]:
    """The rounds of the sides that differ in this region, without the warm-up."""
    skipped = {SDPA} if region is not Stage.ATTENTION else set()
    if region not in WITH_GEMM:
        skipped.add(OWN_GEMM)
    return {name: tuple(taken[-rounds:]) for name, taken in sides.items() if name.removesuffix(GRAPH) not in skipped}


def _chosen(regions: Iterable[str] | None) -> tuple[Stage, ...]:
    if regions is None:
        return FUSED_REGIONS
    chosen = tuple(dict.fromkeys(regions))
    for name in chosen:
        if name not in REGIONS:
            raise UserError(f"unknown op {name!r}{did_you_mean(name, REGIONS)}; expected one of {', '.join(REGIONS)}")
    return tuple(Stage(name) for name in chosen) or FUSED_REGIONS
