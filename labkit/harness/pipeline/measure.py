"""Measures the schedules of a pipeline on ranks of this machine, and tensor parallelism on equally many ranks.

Schedules take turns of whole generations, in rounds: a stage works on one micro-batch while others are on their way, so
no moment belongs to one token, and the bubble is a share of a whole generation. One engine serves all schedules, so the
place of its weights does not differ between them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from labkit.engine.parallel.pipeline_stage import PipelineSpan
from labkit.harness.environment import read_environment
from labkit.harness.pipeline.formulas import SCHEDULES, check_schedule_name
from labkit.harness.pipeline.on_rank import Generated, PipelineTurns, RankFindings, Setting, take_turns_on_rank
from labkit.harness.pipeline.records import MS, PipelineCase, PipelineMeasurement, ScheduleRun, StageSpan, WayPoint
from labkit.launcher.shares import threads_each
from labkit.launcher.spawn import launch
from labkit.stages import Phase
from labkit.statistics.summaries import median_of
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
    """Generates with each schedule and each number of micro-batches, which take turns in `rounds` rounds.

    model: a name as for `resolve`. Every rank reads its part of the model.
    beside: batches at which queue and naive are also compared with tensor parallelism on equally many ranks; empty: no
    such comparison.
    threads: of each rank; None: its share of the processors.
    show: gets the schedules when they are measured.

    UserError for impossible numbers. Ranks that fail raise the errors of `labkit.launch`.
    """
    check_numbers(prompt=prompt, new=new, rounds=rounds, threads=threads)
    settings = settings_of(schedules, micro_batches, batch, stages)
    extra = [
        Setting(schedule=schedule, micro_batches=parts, batch=size)
        for size in beside
        for schedule, parts in (("queue", min(stages, size)), (NAIVE, 1))
    ]
    all_settings = (*settings, *(setting for setting in dict.fromkeys(extra) if setting not in settings))
    origin, threads = resolve(model).origin, threads or threads_each(stages)
    environment = read_environment(threads * stages)
    turns = PipelineTurns(
        model=model, dtype=dtype, ranks=stages, tensor_parallel=False, prompt_tokens=prompt, new_tokens=new,
        rounds=rounds, settings=all_settings,
    )  # fmt: skip
    follow = progress or unheard
    findings = _launched(turns, threads, lambda done, total, label: follow(0.75 * done, total, label))
    runs = _runs(turns, findings)
    chosen = [_chosen(runs[number]) for number in range(len(settings))]
    case = PipelineCase(
        model=model, origin=origin, dtype=dtype, stages=stages, batch=batch, prompt_tokens=prompt, new_tokens=new,
        threads=threads,
    )  # fmt: skip
    ways = _ways(turns, runs, beside)
    measured = _measured(findings, runs, chosen) | {"case": case, "environment": environment}
    show(so_far(PipelineMeasurement, **measured))
    left_out = ""
    if beside:
        try:
            ways += _tensor_parallel(
                turns, beside, threads, lambda done, total, label: follow(0.75 * total + 0.25 * done, total, label)
            )
        except (UserError, RunError) as error:  # a model that cannot be cut for it keeps its pipeline
            left_out = f"tensor parallelism: {str(error).partition(chr(10))[0]}"
    return PipelineMeasurement(ways=tuple(ways), left_out=left_out, **measured)


def _measured(
    findings: Sequence[RankFindings], runs: dict[int, list[ScheduleRun]], chosen: Sequence[ScheduleRun]
) -> dict[str, Any]:
    """The fields of a measurement that come from its schedules. chosen: one run of each of the first settings."""
    rounds = [runs[number] for number in range(len(chosen))]
    return {
        "layers": findings[0].layers,
        "pinned": all(rank.pinned for rank in findings),
        "others_cores": median_of(rank.others_cores for rank in findings),
        "runs": tuple(chosen),
        "bubbles": tuple(tuple(run.bubble for run in setting_runs) for setting_runs in rounds),
        "rates": tuple(tuple(run.tokens_per_s for run in setting_runs) for setting_runs in rounds),
    }


def settings_of(schedules: Sequence[str], micro_batches: Sequence[int], batch: int, stages: int) -> tuple[Setting, ...]:
    """The settings to measure: naive once, and each other schedule with each number of micro-batches. UserError for an
    unknown schedule, no schedule or number, more micro-batches than rows, and fewer than two stages.
    """
    for name in schedules:
        check_schedule_name(name)
    if not schedules or not micro_batches:
        raise UserError("got no schedule, or no number of micro-batches; expected at least one of each")
    check_number("stages", stages, least=2)
    check_numbers(batch=batch)
    if wrong := [count for count in micro_batches if not 1 <= count <= batch]:
        raise UserError(f"got micro_batches = {wrong[0]} for a batch of {batch} rows, expected 1 to {batch}")
    pairs = [(name, parts) for name in schedules for parts in ((1,) if name == NAIVE else micro_batches)]
    return tuple(Setting(schedule=name, micro_batches=parts, batch=batch) for name, parts in dict.fromkeys(pairs))


def _launched(turns: PipelineTurns, threads: int, follow: Progress) -> list[RankFindings]:
    follow(0, 1, f"starting {turns.ranks} ranks")

    def show_progress(line: str) -> None:
        text = line.partition("] ")[2]
        if line.startswith("[rank 0] {"):
            message = json.loads(text)
            follow(message["done"], message["total"], message["label"])

    pp_size, tp_size = (None, turns.ranks) if turns.tensor_parallel else (turns.ranks, None)
    return launch(
        take_turns_on_rank,
        turns,
        threads=threads,
        timeout_s=TIMEOUT_S,
        echo=show_progress,
        pp_size=pp_size,
        tp_size=tp_size,
    )


def _runs(turns: PipelineTurns, findings: Sequence[RankFindings]) -> dict[int, list[ScheduleRun]]:
    """The runs of each setting in the order of the rounds, by the setting's number."""
    runs: dict[int, list[ScheduleRun]] = {number: [] for number in range(len(turns.settings))}
    for generations in zip(*(rank.generated for rank in findings), strict=True):
        runs[generations[0].setting].append(_run(turns, generations))
    return runs


def _run(turns: PipelineTurns, generations: Sequence[Generated]) -> ScheduleRun:
    setting, begin = turns.settings[generations[0].setting], min(rank.begin_ns for rank in generations)
    spans = sorted((_span(span, begin) for rank in generations for span in rank.spans), key=lambda span: span.begin_ms)
    pieces = sum(span.kind == "compute" and span.phase is Phase.PREFILL and span.stage == 0 for span in spans)
    return ScheduleRun(
        schedule=setting.schedule,
        micro_batches=setting.micro_batches,
        batch=setting.batch,
        stages=turns.ranks,
        new_tokens=turns.new_tokens,
        prompt_pieces=pieces,
        wall_ms=(max(rank.end_ns for rank in generations) - begin) / MS,
        spans=tuple(spans),
    )


def _span(span: PipelineSpan, begin_ns: int) -> StageSpan:
    begin, end = (round((at - begin_ns) / MS, DIGITS) for at in (span.begin_ns, span.end_ns))
    fields = asdict(span)
    kept = {name: fields[name] for name in ("kind", "phase", "micro_batch", "step")}
    return StageSpan.model_validate(kept | {"stage": span.pp_rank, "begin_ms": begin, "end_ms": end})


def _chosen(runs: Sequence[ScheduleRun]) -> ScheduleRun:
    """The run with the median bubble; of two medians, the lower."""
    return sorted(runs, key=lambda run: run.bubble)[(len(runs) - 1) // 2]


def _ways(turns: PipelineTurns, runs: dict[int, list[ScheduleRun]], beside: Sequence[int]) -> list[WayPoint]:
    """The points of naive, and of queue with one micro-batch for each stage, at the batches in `beside`."""
    points = []
    for number, setting in enumerate(turns.settings):
        queue = setting.schedule == "queue" and setting.micro_batches == min(turns.ranks, setting.batch)
        if setting.batch in beside and (queue or setting.schedule == NAIVE):
            points.append(_point(setting.schedule, setting.batch, [run.tokens_per_s for run in runs[number]]))
    return points


def _tensor_parallel(turns: PipelineTurns, beside: Sequence[int], threads: int, follow: Progress) -> list[WayPoint]:
    settings = tuple(Setting(schedule="", micro_batches=1, batch=batch) for batch in beside)
    turns = turns.model_copy(update={"tensor_parallel": True, "settings": settings})
    findings = _launched(turns, threads, follow)
    rates: dict[int, list[float]] = {batch: [] for batch in beside}
    for generations in zip(*(rank.generated for rank in findings), strict=True):
        batch, stamps = settings[generations[0].setting].batch, generations[0].stamps_ns
        slowest = max(rank.stamps_ns[-1] for rank in generations) - stamps[0]
        rates[batch].append(batch * (len(stamps) - 1) * 1e9 / slowest)
    return [_point(TENSOR_PARALLEL, batch, batch_rates) for batch, batch_rates in rates.items()]


def _point(way: str, batch: int, rates: Sequence[float]) -> WayPoint:
    return WayPoint(way=way, batch=batch, tokens_per_s=median(rates), runs=tuple(rates))
