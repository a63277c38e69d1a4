"""`make bench`, the part about regions: checks the regions of layers of several shapes against their bars.

python -P -m labkit.bench.regions [--quick] [--output FOLDER]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import typer

from labkit.bench.bars import SHARE, BarCheck, at_least, short_of
from labkit.bench.page import (
    BenchFiles,
    Output,
    Quick,
    Threads,
    cell,
    followed,
    machine_of,
    markdown_table,
    out,
    page_of,
    verdict,
)
from labkit.bench.targets import REGION_RATIOS, REGION_SHARE, REGION_TARGETS, RegionTarget
from labkit.engine.team_size import team_size
from labkit.harness.environment import read_environment
from labkit.harness.regions.measure import measure_regions
from labkit.harness.regions.records import RegionMeasurement
from labkit.harness.regions.sides import FUSED, ONE_CALL, OWN_GEMM, SDPA, UNFUSED
from labkit.harness.regions.vocabulary import REGIONS
from labkit.stages import Stage
from labkit.system.command import run_command

QUICK_EPOCHS = 2
PRECISION, BUDGET_S = 0.05, 40.0  # of the ratios of each case


def main(quick: Quick = False, output: Output = None, threads: Threads = None) -> None:
    """Measure the regions of this machine's kernels against their bars."""
    environment = read_environment(threads or team_size())
    files = BenchFiles.of(machine_of(environment), "regions", quick=quick, output=output)
    rows: list[RegionMeasurement] = []
    for target in REGION_TARGETS:
        of_target = _measure(target, threads, quick=quick)
        met = [check.met for row in of_target for check in checks(row)]
        bars = f": {sum(met)} of {len(met)} bars met" if met else ""
        out.print(f"{_name(of_target[0])}{bars}", soft_wrap=True)
        rows += of_target
    files.finish(rows, page(rows))


def _measure(target: RegionTarget, threads: int | None, *, quick: bool) -> tuple[RegionMeasurement, ...]:
    schedule = {"rounds": QUICK_EPOCHS} if quick else {"precision": PRECISION, "budget_s": BUDGET_S}
    with followed(f"{target.model} {target.dtype}") as follow:
        return measure_regions(
            target.model,
            regions=REGIONS,
            dtype=target.dtype,
            context=target.context,
            threads=threads,
            progress=follow,
            **schedule,
        )


def checks(row: RegionMeasurement) -> Iterator[BarCheck]:
    """The checks of a float32 row: its speedup in the one-call step, and its share of the limit."""
    region = Stage(row.region)
    if row.case.dtype != "float32" or region not in REGION_RATIOS:
        return
    ratio, share, bar = row.ratio(candidate=ONE_CALL), row.floor_share(ONE_CALL), REGION_RATIOS[region]
    yield at_least(region, ratio, bar, possible=short_of(bar, ratio, share), trusted=row.trust.trustworthy)
    if region in (Stage.QKV, Stage.MLP) and share is not None:
        yield at_least(f"{region}, share of the limit", share, REGION_SHARE, SHARE)


def page(rows: Sequence[RegionMeasurement]) -> str:
    """The Markdown page of a bench."""
    first = rows[0]
    tables = []
    for name in dict.fromkeys(map(_name, rows)):
        cases = [row for row in rows if _name(row) == name]
        tables += [f"## {name}", markdown_table(TITLES, [_cells(row) for row in cases])]
    return page_of(
        f"Regions of a layer, unfused and fused, on {first.environment.machine}",
        "A decode step at batch 1 through more layers than any cache holds; microseconds, medians. All sides take "
        "turns in one process, in epochs with the weights in new memory, until the ratios are within "
        f"{PRECISION:.0%} or {BUDGET_S:.0f} seconds are spent. *Unfused*: one torch op after the other, with torch's "
        "GEMM and with labkit's. *Fused*: one call from Python for each region. *One call*: the region within the "
        "one-call step, as the engine runs it; the bars apply to it. The limit is reading a region's bytes at the "
        "bandwidth probed in the rounds. Published figures are DeepSpeed's, against unfused cuBLAS kernels; their "
        "source does not state GPU, model and batch. With int8 the unfused side is bfloat16.",
        verdict([(_name(row), check) for row in rows for check in checks(row)]),
        *tables,
        first.environment.origin,
    )


TITLES = (
    "region", "torch ops", "unfused", "own GEMM", "torch's fused attention", "fused", "one call",
    "unfused / fused", "unfused / one call", "of the limit", "epochs", "published",
)  # fmt: skip


def _cells(row: RegionMeasurement) -> list[str]:
    share = row.floor_share(ONE_CALL)
    times = [row.median_us(side) for side in (UNFUSED, OWN_GEMM, SDPA, FUSED, ONE_CALL)]
    return [
        row.region,
        str(len(row.ops)),
        *(cell(took, "{:.1f}") for took in times),
        str(row.ratio()),
        str(row.ratio(candidate=ONE_CALL)),
        cell(share, "{:.0%}"),
        str(row.count),
        cell(row.published and row.published[0], "{:.1f}x"),
    ]


def _name(row: RegionMeasurement) -> str:
    return f"{row.case.model} {row.case.dtype}, {row.case.context} tokens in the cache"


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
