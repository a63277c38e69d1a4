"""`make bench`, the part about pipelines: the schedules of two stages, and other ways to use two processors.

python -P -m labkit.bench.pipeline [--quick] [--batch N] [--output FOLDER]

A stage's time determines what each schedule can reach: with m micro-batches of t ms per stage, P stages take P t ms for
a token of a whole batch (naive), (m + P - 1) t (barrier) or m t (queue). While reading weights is the limit, fewer rows
do not make t shorter, and the queue gains nothing over naive. If the stages share one memory the queue loses, since t
becomes longer while several stages read.

The bubble of a schedule is the share of the stages' time in which they do nothing. It is measured from the spans of the
stages and compared with its formula.

Stages cannot pause between two tokens, since several micro-batches are on their way, so all sides run in rounds of
whole generations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeAlias

import typer

from labkit.bench.bars import POINTS, US, BarCheck, at_least, at_most
from labkit.bench.page import (
    NONE,
    BenchFiles,
    Output,
    Quick,
    cell,
    checks_table,
    followed,
    machine_of,
    markdown_table,
    out,
    page_of,
    print_checks,
    verdict,
)
from labkit.bench.report import tokens
from labkit.bench.targets import (
    BUBBLE_POINTS,
    HAND_OVER_ROWS,
    HAND_OVER_US,
    HAND_OVER_WIDTH,
    PIPELINE_MODEL,
    PIPELINE_TARGETS,
    PipelineTarget,
)
from labkit.engine import StageTime
from labkit.engine.runners.pipeline.chooser import TRIAL_TOKENS
from labkit.harness.compare.compare import comparison_case
from labkit.harness.compare.interleave import take_turns
from labkit.harness.compare.plan import Schedule, SideSpec
from labkit.harness.comparison import Comparison
from labkit.harness.environment import read_environment
from labkit.harness.exchange.hand_over import measure_hand_over
from labkit.harness.exchange.records import HandOverMeasurement
from labkit.harness.pipeline.measure import measure_pipeline
from labkit.harness.pipeline.records import PipelineMeasurement
from labkit.harness.records import Measurement
from labkit.stages import EXCHANGES, Phase, Stage
from labkit.system.command import run_command
from labkit.system.errors import UserError

PROMPT, NEW, ROUNDS = 128, 64, 6
WARM_UP = TRIAL_TOKENS + 1  # new tokens: enough for the queue to choose its micro-batches before the timed runs
QUICK_NEW, QUICK_ROUNDS, QUICK_CALLS = 4, 2, 10
BUBBLE_BATCH, BUBBLE_PROMPT, BUBBLE_NEW, BUBBLE_ROUNDS = 32, 16, 32, 3
NAIVE, BARRIER, TRANSFORMERS = "fused-pp2-naive", "fused-pp2-barrier", "hf-pipeline-pp2"
BASELINES = (NAIVE, BARRIER, "fused-pp2-rounds", TRANSFORMERS, "fused-tp2", "fused")
QUEUE = "fused-pp2"
STAGES = 2  # each on one thread; the other sides also have this many threads in all
Compared: TypeAlias = dict[str, Comparison]  # comparisons of the queue with each baseline, by the baseline's name


def main(
    quick: Quick = False,
    output: Output = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Measure only this batch, may be repeated; others stay in the files.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="Measure only this baseline, may be repeated; others stay in the files.")
    ] = None,
    stages: Annotated[bool, typer.Option(help="Run each side once more for the times of its stages.")] = True,
    bubbles: Annotated[
        bool, typer.Option(help="Measure the bubble of each schedule; otherwise the bubbles stay in the files.")
    ] = True,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds: a whole run of each side, in random order.")] = ROUNDS,
    new: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = NEW,
) -> None:
    """Measure pipelines of two stages on this machine."""
    targets = [target for target in PIPELINE_TARGETS if not batch or target.batch in batch]
    names = tuple(name for name in BASELINES if not against or name in against)
    if not targets or not names:
        batches = [target.batch for target in PIPELINE_TARGETS]
        raise UserError(f"got --batch {batch} and --against {against}; expected any of {batches} and of {BASELINES}")
    files = BenchFiles.of(machine_of(read_environment(STAGES)), "pipeline", quick=quick, output=output)
    measured = {(target.batch, name) for target in targets for name in names}
    comparisons = [record for record in files.kept(Comparison) if place(record) not in measured]
    bubble_records = files.kept(PipelineMeasurement)
    counts: dict[str, int] = {"rounds": QUICK_ROUNDS, "calls": QUICK_CALLS} if quick else {}
    handed = measure_hand_over(HAND_OVER_ROWS, HAND_OVER_WIDTH, **counts)
    if bubbles:
        bubble_records = [_measure_bubbles(quick=quick)]
        print_checks(bubble_checks(bubble_records[0]))
    for target in targets:
        schedule = Schedule(rounds=QUICK_ROUNDS if quick else rounds, warm_up=WARM_UP, stages=stages)
        of_batch = _measure(target, names, schedule, QUICK_NEW if quick else new)
        for check in checks(target, by_baseline(of_batch)):
            out.print(f"batch {target.batch}, {check.what}: {check.figure} ({check})", soft_wrap=True)
        comparisons += of_batch
        files.write((handed, *bubble_records, *comparisons), page(handed, comparisons, bubble_records))
    files.name_page()


def place(comparison: Comparison) -> tuple[int, str]:
    """Batch and baseline of a comparison."""
    return comparison.case.batch, comparison.baseline.name


def _measure(target: PipelineTarget, baselines: Sequence[str], schedule: Schedule, new: int) -> list[Comparison]:
    """The comparisons of the queue with each baseline, all in the same rounds."""
    with followed(f"batch {target.batch}") as follow:
        turns = take_turns(
            [SideSpec.named(name, STAGES) for name in (*baselines, QUEUE)],
            comparison_case(
                model=PIPELINE_MODEL, dtype="float32", batch=target.batch, prompt=PROMPT, new=new, threads=1
            ),
            schedule,
            progress=follow,
        )
    return [turns.comparison(baseline, -1) for baseline in range(len(baselines))]


def _measure_bubbles(*, quick: bool) -> PipelineMeasurement:
    """Measures all schedules with one micro-batch per stage. Prompts are short, since bubbles concern decode steps."""
    with followed("bubbles") as follow:
        return measure_pipeline(
            PIPELINE_MODEL, stages=STAGES, batch=BUBBLE_BATCH, prompt=BUBBLE_PROMPT, threads=1, progress=follow,
            new=QUICK_NEW if quick else BUBBLE_NEW, rounds=1 if quick else BUBBLE_ROUNDS, micro_batches=(STAGES,),
        )  # fmt: skip


def by_baseline(comparisons: Sequence[Comparison]) -> Compared:
    """The comparisons of one batch by baseline."""
    return {comparison.baseline.name: comparison for comparison in comparisons}


def checks(target: PipelineTarget, compared: Compared) -> Iterator[BarCheck]:
    """The checks of one batch, for the baselines that were measured."""
    for name, bar in ((NAIVE, target.naive), (TRANSFORMERS, target.transformers)):
        if bar is not None and name in compared:
            for metric, words in (("per_token", "per token"), ("end_to_end", "prompt included")):
                trusted = compared[name].trust(metric).trustworthy
                yield at_least(f"{name} / {QUEUE} {words}", compared[name].ratio(metric), bar, trusted=trusted)
    if BARRIER in compared:
        yield at_least(f"{BARRIER} / {QUEUE} per token", compared[BARRIER].ratio("per_token"), 1.0)
    if NAIVE in compared and BARRIER in compared:
        naive, barrier = compared[NAIVE].baseline, compared[BARRIER].baseline
        least, most = by_formula(barrier), by_formula(naive)
        if least is not None and most is not None and least <= most:
            yield at_least(f"{NAIVE} / {BARRIER} per token", naive.per_token_ms / barrier.per_token_ms, 1.0)
    equal = all(comparison.tokens_equal for comparison in compared.values())
    differences = "; ".join(f"{name}: {tokens(comparison)}" for name, comparison in compared.items())
    yield BarCheck("tokens", "equal" if equal else differences, "equal", equal)


def bubble_checks(measured: PipelineMeasurement) -> list[BarCheck]:
    """The checks of the bubbles: points between the measured bubble and its formula."""
    return [
        at_most(f"bubble of {run.schedule}, from its formula", abs(run.points_over), BUBBLE_POINTS, POINTS)
        for run in measured.runs
    ]


def hand_over_check(handed: HandOverMeasurement) -> BarCheck:
    """The check of a message between stages."""
    return at_most(f"handing {handed.rows} rows of {handed.width} over", handed.median_us, HAND_OVER_US, US)


def stage_ms(side: Measurement) -> list[float]:
    """Computing time of each stage for one micro-batch in a decode step, from the run that timed the stages."""
    return [sum(time.total_ms for time in times) / _calls(times) for times in _decode_stages(side)]


def micro_batches(side: Measurement) -> int | None:
    """Number of micro-batches of the batch, from the same run; None: unknown."""
    calls = [_calls(times) for times in _decode_stages(side)]
    return round(max(calls) / (side.case.new_tokens - 1)) if calls else None


def _decode_stages(side: Measurement) -> list[list[StageTime]]:
    """The stages that each rank computed in decode steps."""
    by_rank = [
        [time for time in stages if time.phase == Phase.DECODE and time.stage not in (*EXCHANGES, Stage.SAMPLE)]
        for stages in side.rank_stages
    ]
    return [times for times in by_rank if _calls(times)]


def _calls(stages: Sequence[StageTime]) -> int:
    return max((time.calls for time in stages), default=0)


def by_formula(side: Measurement) -> float | None:
    """Milliseconds for a token of the whole batch by the formula of the side's schedule; None: unknown."""
    stages, parts = stage_ms(side), micro_batches(side)
    if parts is None or len(stages) != side.case.pp or side.case.pp == 1:
        return None
    if parts == 1:
        return sum(stages)
    if side.case.schedule == "barrier":
        return (parts + side.case.pp - 1) * max(stages)
    return max(parts, side.case.pp) * max(stages)


def page(
    handed: HandOverMeasurement, comparisons: Sequence[Comparison], bubble_records: Sequence[PipelineMeasurement]
) -> str:
    """The Markdown page of a bench: the comparisons of the batches, each with the queue as the candidate, and the
    bubbles if they were measured.
    """
    by_batch = {
        batch: by_baseline([comparison for comparison in comparisons if comparison.case.batch == batch])
        for batch in sorted({comparison.case.batch for comparison in comparisons})
    }
    targets = {target.batch: target for target in PIPELINE_TARGETS}
    judged = [
        (f"batch {batch}", check) for batch, compared in by_batch.items() for check in checks(targets[batch], compared)
    ]
    judged += [("bubbles", check) for measured in bubble_records for check in bubble_checks(measured)]
    mailbox_check = hand_over_check(handed)
    case, environment = comparisons[0].case, comparisons[0].candidate.environment
    remarks = [
        f"batch {comparison.case.batch}: {remark}" for comparison in comparisons for remark in comparison.remarks
    ]
    return page_of(
        f"Pipelines of two stages, batch {', '.join(map(str, by_batch))}, on {environment.machine}",
        f"{case.model}, {case.dtype}, prompts of {case.prompt_tokens} tokens; one run of every side in each round, in "
        f"random order. `{QUEUE}` is the schedule queue. The stages are processes of one thread, `fused-tp2` two ranks "
        "of one thread, and `fused` one process of two threads. A token's time is the time of the whole batch. *By "
        "formula* is the time of a schedule from the times of its stages, which an extra run measured: m t for queue "
        "and rounds, (m + P - 1) t for barrier, and the sum of the stages for one micro-batch, as in naive. The queue "
        "uses the number of micro-batches with which its first tokens were faster. While reading weights is the limit, "
        "a micro-batch takes a stage as long as the whole batch, and more micro-batches gain nothing. Here the stages "
        "share one memory, and take longer while both read.",
        verdict([*judged, ("mailboxes", mailbox_check)]),
        *(section for batch, compared in by_batch.items() for section in _sections(targets[batch], compared)),
        *(section for measured in bubble_records for section in _bubbles(measured)),
        "## Mailboxes",
        checks_table([mailbox_check]) + f"\n\n{len(handed.rounds_us)} rounds of {len(handed.rounds_us[0])}, through "
        f"{handed.transport}.",
        "## Remarks",
        "\n".join(f"- {remark}" for remark in dict.fromkeys(remarks)) or "None.",
        environment.origin,
    )


def _sections(target: PipelineTarget, compared: Compared) -> list[str]:
    """The sections about one batch."""
    first = next(iter(compared.values()))
    sides = [*(comparison.baseline for comparison in compared.values()), first.candidate]
    header = ("side", "per token, ms", "by formula, ms", "stages, ms", "micro-batches", "first token, ms")
    return [
        f"## Batch {target.batch}",
        f"{first.case.new_tokens} new tokens, {len(first.candidate.runs)} rounds.",
        markdown_table(
            (*header, "end to end, ms", f"side / {QUEUE} per token", "end to end", "ranks wait in"),
            [_cells(side, compared.get(side.name)) for side in sides],
        ),
        checks_table(checks(target, compared)),
    ]


def _bubbles(measured: PipelineMeasurement) -> list[str]:
    """The section about the bubbles, the share of the stages' time in which they do nothing."""
    case = measured.case
    lines = [
        (
            run.name,
            f"{run.bubble:.1%} [{min(bubbles):.1%}, {max(bubbles):.1%}]",
            f"{run.formula:.1%}",
            " + ".join(f"{ms:.1f}" for ms in run.step_ms),
            f"{run.tokens_per_s:.0f}",
        )
        for run, bubbles in zip(measured.runs, measured.bubbles, strict=True)
    ]
    return [
        "## Bubbles",
        f"{case.title}; {len(measured.bubbles[0])} rounds: the median, the least and the most. The bubble is the share "
        "of the stages' time after the prompts in which they neither compute nor choose tokens. The formulas assume "
        "equal stages.",
        markdown_table(("schedule", "bubble", "by formula", "stages, ms", "tokens/s"), lines),
        checks_table(bubble_checks(measured)),
    ]


def _cells(side: Measurement, comparison: Comparison | None) -> list[str]:
    return [
        side.name,
        f"{side.per_token_ms:.1f}",
        cell(by_formula(side), "{:.1f}"),
        " + ".join(f"{ms:.1f}" for ms in stage_ms(side)) or NONE,
        cell(micro_batches(side) if side.case.pp > 1 else None, "{}"),
        f"{side.ttft_ms:.0f}",
        f"{side.end_to_end_ms:.0f}",
        NONE if comparison is None else str(comparison.ratio("per_token")),
        NONE if comparison is None else str(comparison.ratio("end_to_end")),
        ", ".join(f"{share:.0%}" for share in side.communication_shares) or NONE,
    ]


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
