"""`make bench`, the part about a model larger than its memory: streamed layers against other ways to run it from the
disk.

python -P -m labkit.bench.larger [--model tinyllama-1.1b] [--rounds 6] [--scratch FOLDER] [--output FOLDER]

Every side has the same memory limit, enforced in the same way. Files are made cold before each run, so the sides take
turns of whole generations, in rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from labkit.bench.bars import BarCheck, BarUnit, at_least, at_most
from labkit.bench.page import (
    BenchFiles,
    Output,
    Threads,
    cell,
    checks_table,
    followed,
    llama_cpp_is_missing,
    machine_of,
    markdown_table,
    page_of,
    ratio_cell,
    verdict,
)
from labkit.bench.targets import LARGER, LARGER_RATIO, STREAM_MODEL
from labkit.engine.team_size import team_size
from labkit.harness.compare.compare import compare_with_each, comparison_case
from labkit.harness.compare.disk_sides import ACCELERATE_DISK, HF_DISK, STREAMED
from labkit.harness.compare.peers.llama_cpp import LLAMA_CPP
from labkit.harness.compare.plan import Schedule
from labkit.harness.comparison import Comparison
from labkit.harness.environment import read_environment
from labkit.harness.records import Measurement
from labkit.models.policies import model_config_of
from labkit.system.command import run_command
from labkit.weights.resolve import resolve

DTYPE = "bfloat16"
PROMPT, NEW, WARM_UP = 16, 6, 2
TITLES = (
    *("side", "ms a token", "first token, ms", "disk, GB/s", "of the disk"),
    *("cached, MB", "peak, MB", "to streamed"),
)
OF_BUDGET = BarUnit("{:.2f} of the memory", "{:g}")


def main(
    model: Annotated[str, typer.Option(help="A preset or folder.")] = STREAM_MODEL,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds: a whole run of each side, in random order.")] = 6,
    scratch: Annotated[Path | None, typer.Option(help="Folder on the disk for the models.")] = None,
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Measure several ways to run a model from the disk of this machine."""
    environment = read_environment(threads or team_size())
    files = BenchFiles.of(machine_of(environment), "larger-than-memory", output=output)
    baselines = [*(() if llama_cpp_is_missing() else (LLAMA_CPP,)), ACCELERATE_DISK, HF_DISK]
    weights = model_config_of(resolve(model).hf_config).weight_bytes(torch.bfloat16)
    case = comparison_case(
        model=model,
        dtype=DTYPE,
        batch=1,
        prompt=PROMPT,
        new=NEW,
        threads=environment.threads,
        memory_gb=weights / LARGER / 1e9,
    )
    schedule = Schedule(rounds=rounds, warm_up=WARM_UP, stages=False, scratch=scratch or files.records.parent)
    with followed(model) as follow:
        comparisons = compare_with_each(baselines, STREAMED, case, schedule, progress=follow)
    files.finish(comparisons, page(comparisons), checks(comparisons))


def checks(comparisons: Sequence[Comparison]) -> Iterator[BarCheck]:
    """The checks of all comparisons, which have the same candidate."""
    for comparison in comparisons:
        name, trusted = comparison.baseline.name, comparison.trust("per_token").trustworthy
        yield at_least(f"{name} / {STREAMED}", comparison.ratio("per_token"), LARGER_RATIO, trusted=trusted)
    candidate = comparisons[0].candidate
    if candidate.case.memory_gb is not None and candidate.peak_rss_mb is not None:
        yield at_most("peak memory", candidate.peak_rss_mb / 1e3 / candidate.case.memory_gb, 1.0, OF_BUDGET)


def page(comparisons: Sequence[Comparison]) -> str:
    """The Markdown page of the comparisons."""
    candidate = comparisons[0].candidate
    case, environment = candidate.case, candidate.environment
    assert case.memory_gb is not None
    return page_of(
        f"Larger than memory on {environment.machine}",
        f"{case.model} in {case.dtype}, whose weights are {LARGER:g} times the {case.memory_gb:.2f} GB of each side. "
        f"This is the memory beyond a side's imports, limited by {candidate.memory_limit}. Batch {case.batch}, prompt "
        f"{case.prompt_tokens}, {case.new_tokens} new greedy tokens; {len(candidate.runs)} rounds with one run of each "
        "side in random order. Before a run its files are made cold; the disk is probed before and after it.",
        verdict([(case.model, check) for check in checks(comparisons)]),
        markdown_table(
            TITLES,
            [
                *(_row(comparison.baseline, ratio_cell(comparison, "per_token")) for comparison in comparisons),
                _row(candidate, ""),
            ],
        ),
        "Of the disk: the disk's time for the bytes of a step / the time of the step. Cached: the most of the files "
        "that was in the page cache before a run; pages that a side maps stay. Peak: of the process, mapped files "
        "included.",
        "\n".join(f"- {comparison.baseline.name}: {comparison.baseline.impl}" for comparison in comparisons)
        + f"\n- {STREAMED}: {candidate.impl}",
        checks_table(checks(comparisons)),
        environment.origin,
    )


def _row(side: Measurement, ratio: str) -> tuple[str, ...]:
    cached = [run.cached_mb for run in side.runs if run.cached_mb is not None]
    return (
        side.name,
        f"{side.per_token_ms:.0f}",
        f"{side.ttft_ms:.0f}",
        cell(side.disk_gb_s, "{:.2f}"),
        cell(side.disk_share, "{:.0%}"),
        cell(max(cached, default=None), "{:.0f}"),
        cell(side.peak_rss_mb, "{:.0f}"),
        ratio,
    )


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
