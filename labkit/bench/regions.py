"""`make bench`, second part: the regions of the layers of three shapes, held against their bars.

python -P -m labkit.bench.regions [--quick] [--output FOLDER]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from labkit.bench.models import stem
from labkit.bench.report import markdown_table
from labkit.bench.targets import Check, short_of
from labkit.harness.environment import read_environment
from labkit.harness.regions.measure import ROUNDS, measure_regions
from labkit.harness.regions.records import RegionMeasurement
from labkit.harness.regions.sides import FUSED, ONE_CALL, OWN_GEMM, SDPA, UNFUSED
from labkit.harness.regions.vocabulary import REGIONS
from labkit.stages import Stage
from labkit.system.command import run_command
from labkit.system.progress import progress_bar
from labkit.system.whole_file import write_whole

SHAPES = ("gpt2", "gptj-shape", "llama-shape")
CASES = [(shape, dtype, 128) for dtype in ("float32", "bfloat16", "int8") for shape in SHAPES]
CASES += [(shape, "float32", 1023) for shape in SHAPES]
BARS = {Stage.QKV: 2.5, Stage.ATTENTION: 3.0, Stage.MLP: 3.0, Stage.RESIDUAL: 1.5}  # unfused / fused, in float32
LIMIT_BAR = 0.75  # of the read bandwidth, for the two regions with a matrix
QUICK_ROUNDS = 2

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Two rounds: whether it works, not how fast it is.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder; profiles, or runs with --quick.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default one per core.")] = None,
) -> None:
    """Measure the regions of this machine's kernels against their bars."""
    environment = read_environment(threads or torch.get_num_threads())
    file = (output or Path("runs" if quick else "profiles")) / f"{stem(environment, quick=quick)}-regions.jsonl"
    rows: list[RegionMeasurement] = []
    for model, dtype, context in CASES:
        found = _measure(model, dtype, context, threads, QUICK_ROUNDS if quick else ROUNDS)
        met = [check.met for row in found for check in checks(row)]
        bars = f": {sum(met)} of {len(met)} bars met" if met else ""
        out.print(f"{_name(found[0])}{bars}", soft_wrap=True)
        rows += found
    write_whole(file, "".join(row.model_dump_json() + "\n" for row in rows))
    write_whole(file.with_suffix(".md"), page(rows))
    out.print(str(file.with_suffix(".md")), soft_wrap=True)


def _measure(model: str, dtype: str, context: int, threads: int | None, rounds: int) -> tuple[RegionMeasurement, ...]:
    with progress_bar(err) as follow:
        return measure_regions(
            model,
            regions=REGIONS,
            dtype=dtype,
            context=context,
            threads=threads,
            rounds=rounds,
            progress=lambda done, total, label: follow(done, total, f"{model} {dtype}: {label}"),
        )


def checks(row: RegionMeasurement) -> Iterator[Check]:
    """The bars of a float32 row: its speedup in the one-call step, and its share of the limit."""
    region = Stage(row.region)
    if row.case.dtype != "float32" or region not in BARS:
        return
    ratio, share, bar = row.ratio(candidate=ONE_CALL), row.floor_share(ONE_CALL), BARS[region]
    yield Check(region, str(ratio), f"≥ {bar}x", ratio.value >= bar, possible=short_of(bar, ratio, share))
    if region in (Stage.QKV, Stage.MLP) and share is not None:
        yield Check(region, f"{share:.0%} of the limit", f"≥ {LIMIT_BAR:.0%}", share >= LIMIT_BAR)


def page(rows: Sequence[RegionMeasurement]) -> str:
    """The Markdown page of a bench."""
    first = rows[0]
    judged = [(row, check) for row in rows for check in checks(row)]
    lines = [
        f"# Regions of a layer, unfused and fused, on {first.environment.machine}",
        "",
        f"A decode step at batch 1 through more layers than any cache holds, {len(first.rounds_us[FUSED])} interleaved "
        "rounds; microseconds, medians. *Unfused*: one torch op after the other, with torch's GEMM and with labkit's. "
        "*Fused*: one call from Python for each region. *One call*: the region within the one-call step, as the engine "
        "runs it, which is what the bars are about. The limit is reading a region's bytes at the bandwidth probed "
        "beside the rounds. Published figures are DeepSpeed's, against unfused cuBLAS kernels; GPU, model, batch are "
        "not given there. With int8 the unfused side is bfloat16.",
        "",
        f"**{sum(check.met for _, check in judged)} of {len(judged)} bars met.** Missed:",
        "",
    ]
    missed = [(row, check) for row, check in judged if not check.met]
    lines += [f"- {_name(row)}, {check.what}: {check.figure} ({check})" for row, check in missed] or ["- none"]
    for name in dict.fromkeys(map(_name, rows)):
        cases = [row for row in rows if _name(row) == name]
        lines += ["", f"## {name}", "", markdown_table(TITLES, [_cells(row) for row in cases])]
    environment = first.environment
    lines += ["", environment.origin, ""]
    return "\n".join(lines)


TITLES = (
    "region",
    "torch ops",
    "unfused",
    "own GEMM",
    "torch's fused attention",
    "fused",
    "one call",
    "unfused / fused",
    "unfused / one call",
    "of the limit",
    "published",
)


def _cells(row: RegionMeasurement) -> list[str]:
    share = row.floor_share(ONE_CALL)
    times = [row.median_us(side) for side in (UNFUSED, OWN_GEMM, SDPA, FUSED, ONE_CALL)]
    return [
        row.region,
        str(len(row.ops)),
        *("–" if took is None else f"{took:.1f}" for took in times),
        str(row.ratio()),
        str(row.ratio(candidate=ONE_CALL)),
        "–" if share is None else f"{share:.0%}",
        f"{row.published[0]:.1f}x" if row.published else "–",
    ]


def _name(row: RegionMeasurement) -> str:
    return f"{row.case.model} {row.case.dtype}, {row.case.context} tokens in the cache"


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
