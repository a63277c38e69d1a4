"""Half of the experts in memory: the others are read by need, against llama.cpp's mapping of its file.

python -P -m labkit.bench.experts_on_disk [--model qwen3-moe-shape] [--rounds 6] [--scratch FOLDER]

It is no part of `make bench`, since it writes several times the model's size to the disk. Both sides have the same
memory, enforced in the same way, and take turns of whole generations, as the files are made cold before each. Every
token chooses its experts by itself (`DampedAttention`): at first almost evenly, then with favourites (`SkewedRouter`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape

from labkit.bench.bars import SHARE, BarCheck, at_least
from labkit.bench.page import (
    NONE,
    BenchFiles,
    Output,
    Threads,
    cell,
    checks_table,
    followed,
    llama_cpp_is_missing,
    machine_of,
    markdown_table,
    out,
    page_of,
    ratio_cell,
    stop_if_interrupted,
    verdict,
)
from labkit.engine.offload.footprint import Footprint
from labkit.engine.team_size import team_size
from labkit.harness.compare.compare import compare_with_each, comparison_case
from labkit.harness.compare.disk_sides import STREAMED
from labkit.harness.compare.peers.llama_cpp import LLAMA_CPP
from labkit.harness.compare.plan import Schedule
from labkit.harness.comparison import Comparison
from labkit.harness.environment import read_environment
from labkit.harness.records import Measurement
from labkit.system.command import run_command
from labkit.system.errors import UserError
from labkit.weights.capacity import layers_bytes
from labkit.weights.checkpoint.hf_folder import write_checkpoint
from labkit.weights.damped_attention import DampedAttention
from labkit.weights.resolve import resolve
from labkit.weights.skewed_router import SkewedRouter
from labkit.weights.spec import WeightSpec

DTYPE = "bfloat16"
PROMPT, NEW, WARM_UP = 64, 24, 24
SKEWS = (0.0, 10.0)
DAMPED = 0.01  # attention's part of a row
TIMES_FASTER, OF_WHAT_IS_READ = 2.0, 0.9  # bars
SKEWED = "-skewed-"  # between the name of a written model and its skew
TITLES = (
    *("router", "ms a token", "llama.cpp, ms", "ratio", "experts in memory", "guesses that were right"),
    *("MB a token", "disk, GB/s", "of the disk", "of disk and memory"),
)


def main(
    model: Annotated[str, typer.Option(help="A preset, or a folder, of a model with experts.")] = "qwen3-moe-shape",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds: a whole run of each side, in random order.")] = 6,
    scratch: Annotated[Path | None, typer.Option(help="Folder on the disk for the models.")] = None,
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Measure a mixture of experts that is larger than memory."""
    if llama_cpp_is_missing():
        raise UserError("this bench compares with llama.cpp; install it with `labkit peers --install llama.cpp`")
    environment = read_environment(threads or team_size())
    files = BenchFiles.of(machine_of(environment), "experts-on-disk", output=output)
    records = files.kept(Comparison)
    folder = scratch or files.records.parent
    for skew in SKEWS:
        if any(_skew(record) == skew for record in records):
            continue
        name = written_model(model, skew, folder)
        case = comparison_case(
            model=name,
            dtype=DTYPE,
            batch=1,
            prompt=PROMPT,
            new=NEW,
            threads=environment.threads,
            memory_gb=memory_for_half(model) / 1e9,
        )
        schedule = Schedule(rounds=rounds, warm_up=WARM_UP, stages=False, scratch=folder)
        with followed(f"{model}, router skewed by {skew:g}") as follow:
            (comparison,) = compare_with_each([LLAMA_CPP], STREAMED, case, schedule, progress=follow)
        stop_if_interrupted([comparison])
        records.append(comparison)
        files.write(records, page(records))
        out.print(escape(comparison.claim()), soft_wrap=True)
        shutil.rmtree(name)
    files.finish(records, page(records), [check for record in records for check in checks(record)])


def memory_for_half(model: str) -> float:
    """Memory that holds half of the experts beside everything else, in bytes."""
    spec = WeightSpec.of(resolve(model).hf_config, torch.bfloat16)
    footprint = Footprint.of(spec)
    experts = layers_bytes(spec) - layers_bytes(spec, experts=False)
    return footprint.beside_weights(1, PROMPT, PROMPT + NEW) + footprint.weights - experts / 2


def written_model(model: str, skew: float, folder: Path) -> str:
    """The model with damped attention and skewed routers, as a checkpoint in a new folder."""
    source = resolve(model)
    target = folder / f"{source.hf_config.model_type}{SKEWED}{skew:g}"
    weights = SkewedRouter(DampedAttention(source, DAMPED), skew)
    write_checkpoint(replace(source, weights=weights), torch.bfloat16, target)
    return str(target)


def _skew(record: Comparison) -> float:
    return float(record.case.model.rpartition(SKEWED)[2])


def checks(record: Comparison) -> Iterator[BarCheck]:
    """The bars of a comparison."""
    name, trusted = f"router skewed by {_skew(record):g}", record.trust("per_token").trustworthy
    yield at_least(f"{name}, {LLAMA_CPP}", record.ratio("per_token"), TIMES_FASTER, trusted=trusted)
    if (share := record.candidate.disk_share) is not None:
        yield at_least(f"{name}, of the disk", share, OF_WHAT_IS_READ, SHARE, trusted=trusted)


def page(records: Sequence[Comparison]) -> str:
    """The Markdown page of the comparisons."""
    candidate = records[0].candidate
    case, environment = candidate.case, candidate.environment
    assert case.memory_gb is not None
    model = Path(case.model).name.partition(SKEWED)[0]
    return page_of(
        f"Experts on the disk on {environment.machine}",
        f"{model} in {case.dtype}, with {case.memory_gb:.2f} GB of memory, enough for half of the experts. "
        f"It is the memory beyond a side's imports, limited by {candidate.memory_limit}. Batch {case.batch}, prompt "
        f"{case.prompt_tokens}, {case.new_tokens} new greedy tokens; {len(candidate.runs)} rounds with one run of each "
        f"side in random order. The disk is probed before and after each run. Attention's part of a row is {DAMPED:g} "
        "times that of random weights, so each token chooses by itself, and guesses are nearly always right.",
        verdict([(_router(record), check) for record in records for check in checks(record)]),
        markdown_table(TITLES, map(_row, records)),
        "Of the disk: the disk's time for the experts that were read and used / the time of the steps. Of disk and "
        "memory: the same, with the memory's time for all bytes of a step after the disk's. A side that reads while it "
        "computes can come above 100 %. A guess is what a layer's router chooses for the rows before attention.",
        f"- {LLAMA_CPP}: {records[0].baseline.impl}\n- {STREAMED}: {candidate.impl}",
        checks_table([check for record in records for check in checks(record)]),
        environment.origin,
    )


def _router(record: Comparison) -> str:
    return f"skewed by {skew:g}" if (skew := _skew(record)) else "even"


def _row(record: Comparison) -> tuple[str, ...]:
    candidate, reads = record.candidate, record.candidate.expert_reads
    steps = sum(len(run.decode_ms) for run in candidate.runs)
    return (
        _router(record),
        f"{candidate.per_token_ms:.0f}",
        f"{record.baseline.per_token_ms:.0f}",
        ratio_cell(record, "per_token"),
        NONE if reads is None else f"{reads.hit_rate:.0%}",
        NONE if reads is None else cell(reads.accuracy, "{:.0%}"),
        NONE if reads is None else f"{reads.read_mb / steps:.0f}",
        cell(candidate.disk_gb_s, "{:.2f}"),
        cell(candidate.disk_share, "{:.0%}"),
        cell(_one_after_the_other(candidate), "{:.0%}"),
    )


def _one_after_the_other(side: Measurement) -> float | None:
    """The disk's time for what a step reads and then the memory's time for its bytes / the time of a step."""
    if side.disk_share is None or side.floor_ms is None:
        return None
    return side.disk_share + side.floor_ms / side.per_token_mean_ms


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
