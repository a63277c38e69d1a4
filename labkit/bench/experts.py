"""Mixtures of experts: the fused kernels against transformers, and against llama.cpp if it is installed.

python -P -m labkit.bench.experts [--model qwen3-moe-shape] [--epochs 6]

It is no part of `make bench`, since the model takes 9 GB of memory and each case two minutes. The files are rewritten
after each case, and a stopped bench goes on where it was. The limit counts the experts that a token chooses; for
several tokens it counts their number on average if all choices are equally likely.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.markup import escape

from labkit.bench.bars import SHARE, BarCheck, at_least
from labkit.bench.page import (
    NONE,
    BenchFiles,
    EpochCount,
    Output,
    Threads,
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
from labkit.engine.team_size import team_size
from labkit.harness.compare.compare import compare_with_each, comparison_case
from labkit.harness.compare.plan import Schedule
from labkit.harness.comparison import Comparison
from labkit.harness.environment import read_environment
from labkit.system.command import run_command

EPOCHS = 6
TITLES = ("case", "baseline", "first token", "per token", "ms a token", "share of the limit", "baseline's share")


@dataclass(frozen=True)
class BenchedMixture:
    """A comparison of `candidate` with each baseline, and the least ratios and share of the limit; None: no bar."""

    candidate: str
    dtype: str
    batch: int
    prompt: int
    new: int
    per_token: dict[str, float | None]  # by baseline
    first_token: dict[str, float | None]
    limit_share: float | None = None


HF, LLAMA = "hf-eager", "llama.cpp"
CASES = (
    BenchedMixture("fused", "bfloat16", 1, 128, 64, {HF: 5.0, LLAMA: 1.2}, {}, 0.85),
    BenchedMixture("fused:int4-64", "bfloat16", 1, 128, 64, {"llama.cpp-q4_0": 1.2}, {}, 0.85),
    BenchedMixture("fused", "bfloat16", 8, 128, 32, {HF: None}, {}, 0.9),
    BenchedMixture("fused", "bfloat16", 1, 512, 16, {HF: None, LLAMA: None}, {HF: 1.5, LLAMA: 1.0}),
)


def main(
    model: Annotated[str, typer.Option(help="A preset, or a folder, of a model with experts.")] = "qwen3-moe-shape",
    epochs: EpochCount = EPOCHS,
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Measure a mixture of experts."""
    environment = read_environment(threads or team_size())
    files = BenchFiles.of(machine_of(environment), "experts", output=output)
    records = files.kept(Comparison)
    for benched in CASES:
        case = comparison_case(
            model=model,
            dtype=benched.dtype,
            batch=benched.batch,
            prompt=benched.prompt,
            new=benched.new,
            threads=environment.threads,
        )
        for baseline in benched.per_token:
            if baseline.startswith(LLAMA) and llama_cpp_is_missing():
                continue
            done = any(_belongs(record, benched, baseline) and record.case.model == model for record in records)
            if done:
                continue
            with followed(f"{model}, {benched.candidate}, batch {benched.batch}, {baseline}") as follow:
                schedule = Schedule(rounds=epochs, stages=False)
                (comparison,) = compare_with_each([baseline], benched.candidate, case, schedule, progress=follow)
            stop_if_interrupted([comparison])
            records.append(comparison)
            files.write(records, page(records))
            out.print(escape(comparison.claim()), soft_wrap=True)
    files.finish(records, page(records), [check for record in records for check in checks(record)])


def checks(record: Comparison) -> Iterator[BarCheck]:
    """The bars of a comparison."""
    benched = next(benched for benched in CASES if _belongs(record, benched, record.baseline.name))
    name, trusted = f"{_case(record)}, {record.baseline.name} / {record.candidate.name}", record.trust("per_token")
    if (bar := benched.per_token.get(record.baseline.name)) is not None:
        yield at_least(name, record.ratio("per_token"), bar, trusted=trusted.trustworthy)
    if (bar := benched.first_token.get(record.baseline.name)) is not None:
        trusted = record.trust("ttft")
        yield at_least(f"{name}, first token", record.ratio("ttft"), bar, trusted=trusted.trustworthy)
    if benched.limit_share is not None and (share := record.candidate.floor_share) is not None:
        yield at_least(
            f"{_case(record)}, {record.candidate.name} beside {record.baseline.name}, share of the limit",
            share,
            benched.limit_share,
            SHARE,
            trusted=record.trust("per_token").trustworthy,
        )


def page(records: Sequence[Comparison]) -> str:
    """The Markdown page of the comparisons."""
    environment = records[0].candidate.environment
    return page_of(
        f"Mixtures of experts on {environment.machine}",
        "Random weights, greedy tokens. Random routers choose almost evenly, so the limit of several tokens is near "
        "what they read. " + verdict([(record.case.model, check) for record in records for check in checks(record)]),
        markdown_table(TITLES, map(_row, records)),
        "\n".join(
            f"- {name}: {impl}"
            for name, impl in {
                side.name: side.impl for record in records for side in (record.baseline, record.candidate)
            }.items()
        ),
        environment.origin,
    )


def _row(record: Comparison) -> tuple[str, ...]:
    shares = (record.candidate.floor_share, record.baseline.floor_share)
    return (
        f"{record.case.model}, {_case(record)}, {record.candidate.name}",
        record.baseline.name,
        ratio_cell(record, "ttft"),
        ratio_cell(record, "per_token"),
        f"{record.candidate.per_token_ms:.1f}",
        *(NONE if share is None else f"{share:.0%}" for share in shares),
    )


def _case(record: Comparison) -> str:
    case = record.case
    return f"{case.dtype}, batch {case.batch}, {case.prompt_tokens} + {case.new_tokens} tokens"


def _belongs(record: Comparison, benched: BenchedMixture, baseline: str) -> bool:
    case = record.case
    of_case = (case.dtype, case.batch, case.prompt_tokens, case.new_tokens, record.candidate.name, record.baseline.name)
    return of_case == (benched.dtype, benched.batch, benched.prompt, benched.new, benched.candidate, baseline)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
