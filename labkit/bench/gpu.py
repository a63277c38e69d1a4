"""`make bench-gpu`: the engine on a GPU against vanilla transformers, and the regions of its layers.

python -P -m labkit.bench.gpu [--model MODEL] [--baseline NAME] [--batch N] [--rounds N] [--quick] [--output FOLDER]

All sides of a model run in one process, share one set of random weights on the GPU, and take turns. The files are
written after each case.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated

import typer

from labkit.bench.bars import MS, SHARE, BarCheck, at_least, at_most
from labkit.bench.gpu_sides import OURS, GpuCase, OnDevice, compared, free_memory
from labkit.bench.page import (
    NONE,
    BenchFiles,
    Output,
    cell,
    err,
    followed,
    markdown_table,
    out,
    page_of,
    ratio_cell,
    verdict,
)
from labkit.bench.targets import GPU_BATCH_4, GPU_OF_TARGETS, GPU_RATIOS, GPU_SHARE, GPU_TARGETS, NEW, PROMPT
from labkit.engine.team_size import team_size
from labkit.harness.compare.loader import check_side
from labkit.harness.comparison import Comparison
from labkit.harness.environment import Environment, read_environment
from labkit.harness.regions.measure import measure_regions
from labkit.harness.regions.records import RegionMeasurement
from labkit.harness.regions.sides import FUSED, GRAPH, OWN_GEMM, SDPA, UNFUSED
from labkit.harness.regions.vocabulary import REGIONS
from labkit.kernels import gpu
from labkit.kernels.tuned import slug
from labkit.system.command import run_command
from labkit.system.errors import UserError
from labkit.system.progress import progress_bar

ROUNDS = 6
QUICK_NEW, QUICK_ROUNDS = 8, 2
BASELINES_OF_GPU = ("hf-eager", "hf-static", "hf-graph")


def main(
    model: Annotated[list[str] | None, typer.Option(help="A preset; may be repeated.")] = None,
    against: Annotated[list[str] | None, typer.Option("--baseline", help="A baseline; may be repeated.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="A batch size; may be repeated. Default: 1 and 4.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Turns of each side.")] = ROUNDS,
    quick: Annotated[bool, typer.Option("--quick", help="Few tokens: tests that it works, not its speed.")] = False,
    regions: Annotated[bool, typer.Option(help="Also measure the regions of the layers.")] = True,
    output: Output = None,
) -> None:
    """Measure this machine's GPU against the targets."""
    gpu.require()
    baselines = _baselines(against or BASELINES_OF_GPU)
    environment = read_environment(team_size())
    files = BenchFiles.of(f"gpu-{slug(gpu.gpu_name() or 'interpreter')}", quick=quick, output=output)
    records: list[Comparison] = []
    rows: list[RegionMeasurement] = []

    def write() -> None:
        files.write((*records, *rows), page(records, rows, environment))

    for name in model or [target.model for target in GPU_TARGETS]:
        source = OnDevice.of(name)
        for size in batch or (1, 4):
            case = GpuCase(size, QUICK_NEW if quick else NEW, QUICK_ROUNDS if quick else rounds, PROMPT)
            comparisons = _steps(source, baselines, case)
            records += comparisons
            write()
            for record in comparisons:
                out.print(_line(record), soft_wrap=True)
        del source
        free_memory()
        if regions:
            rows += _regions(name, QUICK_ROUNDS if quick else rounds)
            write()
    files.name_page()


def _baselines(names: Sequence[str]) -> tuple[str, ...]:
    """The baselines, each once. UserError for one of our own sides, and for a baseline that cannot run here."""
    for name in names:
        if name in OURS:
            raise UserError(f"got the baseline {name!r}, which is measured against the baselines; leave it out")
        check_side(name, dtype="float16", batch=1)
    return tuple(dict.fromkeys(names))


def _steps(source: OnDevice, baselines: Sequence[str], case: GpuCase) -> list[Comparison]:
    total = case.rounds * (len(baselines) + len(OURS))
    comparisons: list[Comparison] = []
    with progress_bar(err) as follow:
        for index, new_comparisons in enumerate(compared(source, baselines, case)):
            follow(index, total, f"{source.name}, batch {case.batch}")
            comparisons += new_comparisons
    return comparisons


def _regions(model: str, rounds: int) -> list[RegionMeasurement]:
    rows: list[RegionMeasurement] = []
    for dtype in ("float16", "int8"):
        with followed(f"{model} {dtype}") as follow:
            rows += measure_regions(
                model, regions=REGIONS, rounds=rounds, progress=follow, impl="triton", dtype=dtype, context=PROMPT
            )
        free_memory()
    return rows


def checks(records: Sequence[Comparison], rows: Sequence[RegionMeasurement]) -> Iterator[tuple[str, BarCheck]]:
    """All checks of the records against their bars, each with the name of its case."""
    return chain(_step_checks(records), _ratio_checks(records), _region_checks(rows))


def _step_checks(records: Sequence[Comparison]) -> Iterator[tuple[str, BarCheck]]:
    """Our steps at batch 1, in milliseconds on the GPU of the targets and else as a share of the limit, and the ratio
    of a step at batch 4 to a step at batch 1.
    """
    targets = {target.model: target for target in GPU_TARGETS}
    steps = {(record.case.model, record.candidate.name, record.case.batch): record.candidate for record in records}
    for (model, name, batch), side in steps.items():
        target, case = targets.get(model), f"{model} {name}, batch {batch}"
        if batch == 1 and target is not None:
            if GPU_OF_TARGETS in (side.environment.gpu or ""):
                most = target.int8_ms if name == "fused-int8" else target.float16_ms
                yield case, at_most("per token", side.per_token_ms, most, MS)
            elif side.floor_share is not None:
                yield case, at_least("share of the limit", side.floor_share, GPU_SHARE, SHARE)
        if batch == 4 and name == "fused" and (model, name, 1) in steps:
            share = side.per_token_ms / steps[model, name, 1].per_token_ms
            yield case, at_most("a step / a step at batch 1", share, GPU_BATCH_4)


def _ratio_checks(records: Sequence[Comparison]) -> Iterator[tuple[str, BarCheck]]:
    for record in records:
        bar = GPU_RATIOS.get(record.baseline.name)
        if bar is not None and record.candidate.name == "fused" and record.case.batch == 1:
            what, trusted = f"{record.baseline.name} / fused", record.trust().trustworthy
            yield f"{record.case.model}, batch 1", at_least(what, record.ratio("per_token"), bar, trusted=trusted)


def _region_checks(rows: Sequence[RegionMeasurement]) -> Iterator[tuple[str, BarCheck]]:
    """Checks the calls of a region from Python against its published speedup."""
    for row in rows:
        if row.published is not None and row.case.dtype == "float16":
            trusted = row.trust_of(row.ratio(), row.floor_share(FUSED)).trustworthy
            check = at_least("from Python", row.ratio(), row.published[0], trusted=trusted)
            yield f"{row.case.model} {row.region}", check


def page(records: Sequence[Comparison], rows: Sequence[RegionMeasurement], environment: Environment) -> str:
    """The Markdown page of a bench."""
    regions = []
    for name in dict.fromkeys((row.case.model, row.case.dtype) for row in rows):
        cases = [row for row in rows if (row.case.model, row.case.dtype) == name]
        regions += [
            f"## Regions of {name[0]}, {name[1]}, batch 1: µs",
            markdown_table(REGION_TITLES, map(_region_cells, cases)),
        ]
    return page_of(
        f"The engine on a GPU: {environment.gpu or 'none, interpreted on the CPU, so that no time means anything'}",
        "Random float16 weights of the real shapes, shared by all sides of a model, which take turns in one process. "
        "The limit is reading a step's bytes at the bandwidth of a kernel that only reads, measured between the runs. "
        "Ratios are baseline / candidate with 95 % intervals over rounds.",
        verdict(list(checks(records, rows))),
        "## Per token",
        markdown_table(STEP_TITLES, map(_step_cells, records)),
        *regions,
        f"{environment.machine}; {environment.versions}; commit {environment.commit}",
    )


STEP_TITLES = (
    "model", "batch", "baseline", "candidate", "baseline, ms", "candidate, ms", "ratio", "of the limit", "first token",
    "tokens",
)  # fmt: skip
REGION_SIDES = (UNFUSED, OWN_GEMM, SDPA, FUSED)
REGION_TITLES = (
    "region", "torch ops", *REGION_SIDES, *(f"{side}{GRAPH}" for side in REGION_SIDES),
    "unfused / fused", "both in graphs", "of the limit", "published",
)  # fmt: skip


def _step_cells(record: Comparison) -> list[str]:
    return [
        record.case.model,
        str(record.case.batch),
        record.baseline.name,
        record.candidate.name,
        f"{record.baseline.per_token_ms:.2f}",
        f"{record.candidate.per_token_ms:.2f}",
        ratio_cell(record, "per_token"),
        cell(record.candidate.floor_share, "{:.0%}"),
        ratio_cell(record, "ttft"),
        "equal" if record.tokens_equal else f"equal up to {record.first_difference}",
    ]


def _region_cells(row: RegionMeasurement) -> list[str]:
    times = [row.median_us(side) for side in (*REGION_SIDES, *(f"{side}{GRAPH}" for side in REGION_SIDES))]
    unfused, fused = row.in_engine
    return [
        row.region,
        str(len(row.ops)),
        *(cell(took, "{:.1f}") for took in times),
        str(row.ratio()),
        str(row.ratio(unfused, fused)) if fused in row.rounds_us else NONE,
        cell(row.floor_share(fused), "{:.0%}"),
        cell(row.published and row.published[0], "{:.1f}x"),
    ]


def _line(record: Comparison) -> str:
    side = record.candidate
    return (
        f"{record.case.model}, batch {record.case.batch}: {side.name} {side.per_token_ms:.2f} ms per token, "
        f"{ratio_cell(record, 'per_token')} over {record.baseline.name}"
    )


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
