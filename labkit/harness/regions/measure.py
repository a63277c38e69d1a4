"""`labkit kernels` compares each region of a model's layers unfused, fused, and with the limit of the memory."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, TypeVar

import numpy as np
import torch

from labkit.harness.compare.plan import Schedule, check_schedule
from labkit.harness.environment import read_environment
from labkit.harness.quiet import wait_until_quiet
from labkit.harness.regions.case import layer_case, shape_of
from labkit.harness.regions.clocks import Samples
from labkit.harness.regions.layer_side import LayerSide, OneCall
from labkit.harness.regions.layer_stack import LayerStack, layer_stack
from labkit.harness.regions.on_gpu import GpuCalls, Graph
from labkit.harness.regions.records import LadderMeasurement, LayerCase, LayerRecord, RegionMeasurement
from labkit.harness.regions.sides import FUSED, GRAPH, ONE_CALL, OWN_GEMM, SDPA
from labkit.harness.regions.vocabulary import REGIONS, RUNGS, WITH_GEMM
from labkit.harness.results import save_lines
from labkit.harness.roofline import probe_turn, region_bytes, region_flops
from labkit.harness.turns.calls import CallEpochs, CallRounds
from labkit.kernels.build import load
from labkit.models.dtypes import dtype_of
from labkit.stages import FUSED_REGIONS, Stage
from labkit.system.errors import UserError
from labkit.system.home import expanded
from labkit.system.nearest import did_you_mean
from labkit.system.output_folder import check_output_folder
from labkit.system.progress import Progress

BUDGET_S = 30.0
NOTHING = nullcontext()
Timer = Callable[[], dict[str, Samples]]  # times a side, perhaps in several ways
SideTimes = dict[str, dict[Stage, float]]  # microseconds of a call, by side and region
Result = TypeVar("Result")
Record = TypeVar("Record", bound=LayerRecord)


class LayerBench:
    """The layers of a case, built once and timed region by region and rung by rung.

    All sides are calls in this process, in epochs between which the weights of all sides are put into new memory. On a
    GPU the weights stay where they are. `schedule_of` describes how long it measures. An interrupt (Ctrl-C) after two
    epochs ends a measurement with what was timed; before that it is raised.

    Raises BuildError where the C++ kernels can't be compiled.
    """

    def __init__(self, case: LayerCase) -> None:
        if case.impl == "cpp":
            load(case.dtype)
        self.case = case
        self.stack = layer_stack(shape_of(case.model), case)

    def regions(
        self,
        regions: Iterable[str] | None = None,
        *,
        rounds: int | None = None,
        budget_s: float | None = None,
        precision: float | None = None,
        progress: Progress | None = None,
    ) -> tuple[RegionMeasurement, ...]:
        """Times regions (None: the four fused regions) of all sides.

        ValueError for an unknown region, and as from `schedule_of`.
        """
        chosen, schedule = _chosen(regions), schedule_of(rounds, budget_s, precision)
        stack, case = self.stack, self.case
        counted, dtype = stack.counted(), dtype_of(case.dtype)
        environment = read_environment(case.threads)
        sides, warm_sides = ([partial(_medians, timer) for timer in timers] for timers in self._timers())
        warm: list[SideTimes] = []

        def after() -> None:
            warm.extend(times() for times in warm_sides)

        def records(measured: CallRounds[SideTimes]) -> tuple[RegionMeasurement, ...]:
            cold = [times for round_times in measured.results for times in round_times]
            return tuple(
                RegionMeasurement(
                    region=region,
                    case=case,
                    environment=environment,
                    ops=tuple(counted[region].ops),
                    unfused_bytes=counted[region].bytes,
                    bytes=region_bytes(stack.config, region, dtype, case.batch, case.context),
                    flops=region_flops(stack.config, region, case.batch, case.context),
                    rounds_us=_of_region(region, cold),
                    warm_us=_of_region(region, warm),
                    **measured.conditions,
                )
                for region in chosen
            )

        return self._measured(sides, records, schedule, progress, after=after)

    def ladder(
        self,
        *,
        rounds: int | None = None,
        budget_s: float | None = None,
        precision: float | None = None,
        progress: Progress | None = None,
    ) -> LadderMeasurement:
        """Times whole steps with more and more regions fused. ValueError as from `schedule_of`."""
        schedule = schedule_of(rounds, budget_s, precision)
        stack, case = self.stack, self.case
        dtype, environment = dtype_of(case.dtype), read_environment(case.threads)
        fused_steps: list[Callable[[], object]] = [partial(_step, stack.with_fused(fused)) for fused in RUNGS.values()]
        if stack.gpu_step is not None:
            steps = [_gpu_timer(run) for run in (*fused_steps, stack.gpu_step)]
        else:
            steps = [*(partial(_wall_us, run) for run in fused_steps), partial(_stamped_us, stack)]
        names = [*RUNGS, ONE_CALL if stack.gpu_step is None else FUSED + GRAPH]

        def record(measured: CallRounds[float]) -> tuple[LadderMeasurement]:
            by_rung = zip(names, np.transpose(measured.results) / case.layers, strict=True)
            ladder = LadderMeasurement(
                case=case,
                environment=environment,
                bytes=sum(region_bytes(stack.config, region, dtype, case.batch, case.context) for region in REGIONS),
                rounds_us={name: tuple(taken.tolist()) for name, taken in by_rung},
                **measured.conditions,
            )
            return (ladder,)

        (ladder,) = self._measured(steps, record, schedule, progress)
        return ladder

    def _timers(self) -> tuple[list[Timer], list[Timer]]:
        """Two timers of every side: for a round, and for a layer that stays in the processor's cache."""
        stack = self.stack
        if self.case.impl == "triton":
            calls = [GpuCalls(side) for side in stack.sides]
            return [side_calls.times for side_calls in calls], [side_calls.warm_times for side_calls in calls]
        assert stack.one_call is not None
        cold: list[Timer] = [*(partial(_named, side) for side in stack.sides), partial(_named, stack.one_call)]
        return cold, [partial(_named, side, warm=True) for side in stack.sides]

    def _measured(
        self,
        sides: Sequence[Callable[[], Result]],
        records: Callable[[CallRounds[Result]], tuple[Record, ...]],
        schedule: Schedule,
        progress: Progress | None,
        *,
        after: Callable[[], None] = lambda: None,
    ) -> tuple[Record, ...]:
        """The records of the epochs after which the gain of each record is decided."""
        device = self.stack.sides[0].hidden_NH.device

        def still_open(measured: CallRounds[Result]) -> list[Record]:
            return [record for record in records(measured) if not _is_answered(record, schedule.precision)]

        def words(measured: CallRounds[Result]) -> str:
            gains = [f"{_subject(record)} {record.gain}" for record in still_open(measured)]
            return f"undecided are {', '.join(gains)}" if gains else "decided"

        probe = partial(probe_turn, self.case.threads, device)
        epochs = CallEpochs(sides, self.stack.tensors, probe=probe, threads=self.case.threads, after=after)
        answered: Callable[[CallRounds[Result]], bool] = lambda measured: not still_open(measured)  # noqa: E731
        return records(epochs.run(schedule, answered=answered, words=words, progress=progress))


def schedule_of(rounds: int | None, budget_s: float | None, precision: float | None) -> Schedule:
    """How long regions are measured.

    rounds: a fixed number of epochs, each of some rounds; with a `budget_s` it is the least number.
    budget_s: add epochs until the gain of each region is decided or this many seconds are spent. None: BUDGET_S, or no
    budget where `rounds` is given.
    precision: go on until the upper end of each gain's interval is only this fraction above its lower end; None: a
    verdict is enough.

    UserError for fewer than two epochs, and for a number that is not positive.
    """
    schedule = Schedule(
        rounds=rounds, budget_s=BUDGET_S if rounds is None and budget_s is None else budget_s, precision=precision
    )
    check_schedule(schedule)
    return schedule


def measure_regions(
    model: str = "gpt2",
    *,
    regions: Iterable[str] | None = None,
    rounds: int | None = None,
    budget_s: float | None = None,
    precision: float | None = None,
    wait_quiet_s: float | None = None,
    output: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[RegionMeasurement, ...]:
    """Times regions of `layer_case(model, **options)`. `save_regions` writes the records.

    regions: None: the four fused regions.
    rounds, budget_s, precision: as for `schedule_of`.
    wait_quiet_s: wait at most this long until other programs leave the processors alone; None: do not wait.
    output: a folder for the caller's records, checked and made before anything is measured.

    All arguments are checked before anything is waited for or built.
    """
    _chosen(regions)
    schedule_of(rounds, budget_s, precision)
    case = layer_case(model, **options)
    if output is not None:
        check_output_folder(output)
    if wait_quiet_s is not None:
        wait_until_quiet(wait_quiet_s, needed=case.threads if case.impl == "cpp" else 1, progress=progress)
    return LayerBench(case).regions(regions, rounds=rounds, budget_s=budget_s, precision=precision, progress=progress)


def save_regions(rows: Sequence[RegionMeasurement], folder: str | os.PathLike[str]) -> Path:
    """Writes the regions of one bench as a file of JSON lines in `folder`; returns its path. SaveError as `save`."""
    case, created = rows[0].case, rows[0].created
    stem = f"{created:%Y%m%dT%H%M%S%f}-{Path(case.model).name}-{case.dtype}-b{case.batch}-regions"
    return save_lines(expanded(folder) / f"{stem}.jsonl", rows)


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


def _is_answered(record: LayerRecord, precision: float | None) -> bool:
    return record.trust.decides(record.gain) if precision is None else record.gain.is_narrow(precision)


def _subject(record: LayerRecord) -> str:
    return record.region if isinstance(record, RegionMeasurement) else "the layer"


def _medians(timer: Timer) -> SideTimes:
    return {
        side: {region: float(np.median(calls_ns)) / 1e3 for region, calls_ns in samples.items()}
        for side, samples in timer().items()
    }


def _of_region(region: Stage, times: Iterable[SideTimes]) -> dict[str, tuple[float, ...]]:
    """Microseconds in this region, one after the other, of the sides that differ in it."""
    skipped = {SDPA} if region is not Stage.ATTENTION else set()
    if region not in WITH_GEMM:
        skipped.add(OWN_GEMM)
    of_sides: defaultdict[str, list[float]] = defaultdict(list)
    for side_times in times:
        for side, regions in side_times.items():
            if side.removesuffix(GRAPH) not in skipped:
                of_sides[side].append(regions[region])
    return {side: tuple(taken) for side, taken in of_sides.items()}


def _chosen(regions: Iterable[str] | None) -> tuple[Stage, ...]:
    if regions is None:
        return FUSED_REGIONS
    chosen = tuple(dict.fromkeys(regions))
    for name in chosen:
        if name not in REGIONS:
            raise UserError(f"unknown op {name!r}{did_you_mean(name, REGIONS)}; expected one of {', '.join(REGIONS)}")
    return tuple(Stage(name) for name in chosen) or FUSED_REGIONS
