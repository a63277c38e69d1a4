"""Measures the schedules of a pipeline on ranks of this machine, and tensor parallelism on as many beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from labkit.engine.parallel.pipeline_stage import PipelineSpan
from labkit.harness.environment import read_environment
from labkit.harness.pipeline.formulas import SCHEDULES
from labkit.harness.pipeline.on_rank import Generated, PipelineTurns, RankFindings, Setting, take_turns_on_rank
from labkit.harness.pipeline.records import MS, PipelineCase, PipelineMeasurement, ScheduleRun, StageSpan, WayPoint
from labkit.launcher.shares import threads_each
from labkit.launcher.spawn import launch
from labkit.stages import Phase
from labkit.system.bounds import check_number, check_numbers
from labkit.system.errors import RunError, UserError
from labkit.system.partly import Show, so_far, unseen
from labkit.system.progress import Progress, unheard
from labkit.weights.resolve import resolve

TENSOR_PARALLEL, NAIVE = "tensor parallel", "naive"
TIMEOUT_S = 3600.0
DIGITS = 4  # of milliseconds: a tenth of a microsecond


def measure_pipeline(
    model: str,
    *,
    dtype: str = "float32",
    stages: int = 2,
    batch: int = 32,
    prompt: int = 16,
    new: int = 16,
    schedules: Sequence[str] = SCHEDULES,
    micro_batches: Sequence[int] = (2, 4),
    beside: Sequence[int] = (),
    rounds: int = 3,
    threads: int | None = None,
    progress: Progress | None = None,
    show: Show = unseen,
) -> PipelineMeasurement:
    """Generates with each schedule, and each number of micro-batches where it has several, in turns and `rounds` times.

    beside: batches at which the queue and naive are also held against tensor parallelism on as many ranks; none: no
    ranks are started for that. threads: of each rank; None: its share of the processors. The model is given by a name
    as for `resolve`, and every rank reads its part of it. show: given the schedules once they are measured.

    UserError for numbers that cannot be, and what `labkit.launch` raises for ranks that fail.
    """
    check_numbers(prompt=prompt, new=new, rounds=rounds, threads=threads)
    settings = settings_of(schedules, micro_batches, batch, stages)
    extra = [
        Setting(schedule=schedule, micro_batches=parts, batch=each)
        for each in beside
        for schedule, parts in (("queue", min(stages, each)), (NAIVE, 1))
    ]
    wanted = (*settings, *(each for each in dict.fromkeys(extra) if each not in settings))
    origin, threads = resolve(model).origin, threads or threads_each(stages)
    environment = read_environment(threads * stages)
    turns = PipelineTurns(
        model=model, dtype=dtype, ranks=stages, tensor_parallel=False, prompt_tokens=prompt, new_tokens=new,
        rounds=rounds, settings=wanted,
    )  # fmt: skip
    follow = progress or unheard
    found = _launched(turns, threads, lambda done, total, label: follow(0.75 * done, total, label))
    runs = _runs(turns, found)
    chosen = [_chosen(runs[number]) for number in range(len(settings))]
    case = PipelineCase(
        model=model, origin=origin, dtype=dtype, stages=stages, batch=batch, prompt_tokens=prompt, new_tokens=new,
        threads=threads,
    )  # fmt: skip
    ways = _ways(turns, runs, beside)
    measured = _measured(found, runs, chosen) | {"case": case, "environment": environment}
    show(so_far(PipelineMeasurement, **measured))
    left_out = ""
    if beside:
        try:
            ways += _tensor_parallel(
                turns, beside, threads, lambda done, total, label: follow(0.75 * total + 0.25 * done, total, label)
            )
        except (UserError, RunError) as error:  # a model that cannot be cut that way keeps its pipeline
            left_out = f"tensor parallelism: {str(error).partition(chr(10))[0]}"
    return PipelineMeasurement(ways=tuple(ways), left_out=left_out, **measured)


def _measured(
    found: Sequence[RankFindings], runs: dict[int, list[ScheduleRun]], chosen: Sequence[ScheduleRun]
) -> dict[str, Any]:
    """The fields of a measurement that its schedules give. chosen: a run of each of the first settings."""
    known = [each.others_cores for each in found if each.others_cores is not None]
    rounds = [runs[number] for number in range(len(chosen))]
    return {
        "layers": found[0].layers,
        "pinned": all(each.pinned for each in found),
        "others_cores": median(known) if known else None,
        "runs": tuple(chosen),
        "bubbles": tuple(tuple(run.bubble for run in of_setting) for of_setting in rounds),
        "rates": tuple(tuple(run.tokens_per_s for run in of_setting) for of_setting in rounds),
    }


def settings_of(schedules: Sequence[str], micro_batches: Sequence[int], batch: int, stages: int) -> tuple[Setting, ...]:
    """What is measured: naive once, and each other schedule with each number of micro-batches. UserError for unknown
    schedules, no numbers, more micro-batches than rows, and fewer than two stages.
    """
    if unknown := [name for name in schedules if name not in SCHEDULES]:
        raise UserError(f"unknown schedule {unknown[0]!r}; expected one of {', '.join(SCHEDULES)}")
    if not schedules or not micro_batches:
        raise UserError("got no schedule, or no number of micro-batches; expected at least one of each")
    check_number("stages", stages, least=2)
    check_numbers(batch=batch)
    if wrong := [each for each in micro_batches if not 1 <= each <= batch]:
        raise UserError(f"got micro_batches = {wrong[0]} for a batch of {batch} rows, expected 1 to {batch}")
    pairs = [(name, parts) for name in schedules for parts in ((1,) if name == NAIVE else micro_batches)]
    return tuple(Setting(schedule=name, micro_batches=parts, batch=batch) for name, parts in dict.fromkeys(pairs))


def _launched(turns: PipelineTurns, threads: int, follow: Progress) -> list[RankFindings]:
    follow(0, 1, f"starting {turns.ranks} ranks")

    def heard(line: str) -> None:
        told = line.partition("] ")[2]
        if line.startswith("[rank 0] {"):
            said = json.loads(told)
            follow(said["done"], said["total"], said["label"])

    pp_size, tp_size = (None, turns.ranks) if turns.tensor_parallel else (turns.ranks, None)
    return launch(
        take_turns_on_rank, turns, threads=threads, timeout_s=TIMEOUT_S, echo=heard, pp_size=pp_size, tp_size=tp_size
    )


def _runs(turns: PipelineTurns, found: Sequence[RankFindings]) -> dict[int, list[ScheduleRun]]:
    """Of each setting, by its number, the runs in the order of the rounds."""
    runs: dict[int, list[ScheduleRun]] = {number: [] for number in range(len(turns.settings))}
    for of_ranks in zip(*(each.generated for each in found), strict=True):
        runs[of_ranks[0].setting].append(_run(turns, of_ranks))
    return runs


def _run(turns: PipelineTurns, of_ranks: Sequence[Generated]) -> ScheduleRun:
    setting, begin = turns.settings[of_ranks[0].setting], min(each.begin_ns for each in of_ranks)
    spans = sorted((_span(span, begin) for each in of_ranks for span in each.spans), key=lambda span: span.begin_ms)
    pieces = sum(span.kind == "compute" and span.phase is Phase.PREFILL and span.stage == 0 for span in spans)
    return ScheduleRun(
        schedule=setting.schedule,
        micro_batches=setting.micro_batches,
        batch=setting.batch,
        stages=turns.ranks,
        new_tokens=turns.new_tokens,
        prompt_pieces=pieces,
        wall_ms=(max(each.end_ns for each in of_ranks) - begin) / MS,
        spans=tuple(spans),
    )


def _span(span: PipelineSpan, begin_ns: int) -> StageSpan:
    begin, end = (round((at - begin_ns) / MS, DIGITS) for at in (span.begin_ns, span.end_ns))
    noted = asdict(span)
    told = {name: noted[name] for name in ("kind", "phase", "micro_batch", "step")}
    return StageSpan.model_validate(told | {"stage": span.pp_rank, "begin_ms": begin, "end_ms": end})


def _chosen(runs: Sequence[ScheduleRun]) -> ScheduleRun:
    """The one with the median bubble, the lower of two."""
    return sorted(runs, key=lambda run: run.bubble)[(len(runs) - 1) // 2]


def _ways(turns: PipelineTurns, runs: dict[int, list[ScheduleRun]], beside: Sequence[int]) -> list[WayPoint]:
    """The queue of as many micro-batches as stages, and naive, at the batches that are held against others."""
    found = []
    for number, setting in enumerate(turns.settings):
        plain = setting.schedule == NAIVE or (setting.schedule, setting.micro_batches) == (
            "queue", min(turns.ranks, setting.batch),
        )  # fmt: skip
        if setting.batch in beside and plain:
            found.append(_point(setting.schedule, setting.batch, [run.tokens_per_s for run in runs[number]]))
    return found


def _tensor_parallel(turns: PipelineTurns, beside: Sequence[int], threads: int, follow: Progress) -> list[WayPoint]:
    settings = tuple(Setting(schedule="", micro_batches=1, batch=batch) for batch in beside)
    turns = turns.model_copy(update={"tensor_parallel": True, "settings": settings})
    found = _launched(turns, threads, follow)
    rates: dict[int, list[float]] = {batch: [] for batch in beside}
    for of_ranks in zip(*(each.generated for each in found), strict=True):
        batch, stamps = settings[of_ranks[0].setting].batch, of_ranks[0].stamps_ns
        slowest = max(each.stamps_ns[-1] for each in of_ranks) - stamps[0]
        rates[batch].append(batch * (len(stamps) - 1) * 1e9 / slowest)
    return [_point(TENSOR_PARALLEL, batch, of_batch) for batch, of_batch in rates.items()]


def _point(way: str, batch: int, rates: Sequence[float]) -> WayPoint:
    return WayPoint(way=way, batch=batch, tokens_per_s=median(rates), runs=tuple(rates))
