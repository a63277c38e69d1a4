"""`make bench`, the part about what people wait for: from the command in a shell to the last token.

python -P -m labkit.bench.cold_start [--model smollm2-135m] [--prompts 128,2000,7000] [--new 64] [--rounds 3]

Each side is a script that imports its library, loads the model in bfloat16 from files in the page cache, reads the
prompt and generates greedy tokens, which it passes on one by one. llama.cpp takes part if it is installed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic_ns
from typing import Annotated

import torch
import typer

from labkit.bench.page import (
    BenchFiles,
    Output,
    Threads,
    err,
    llama_cpp_is_missing,
    machine_of,
    markdown_table,
    page_of,
)
from labkit.engine.team_size import team_size
from labkit.harness.cold_start_record import PHASES, ColdStart
from labkit.harness.compare.conversion import converted
from labkit.harness.compare.peers.llama_cpp import FILE, LLAMA_CPP
from labkit.harness.compare.peers.table import PEERS
from labkit.harness.environment import read_environment
from labkit.harness.rounds import random_orders
from labkit.system.child import run_child
from labkit.system.comma_list import listed_counts
from labkit.system.command import run_command
from labkit.system.errors import UserError
from labkit.system.progress import progress_bar
from labkit.weights.checkpoint.hf_folder import write_checkpoint
from labkit.weights.resolve import resolve

DTYPE = "bfloat16"
WORKER = "labkit.bench.cold_start_worker"
FUSED, VANILLA = "fused", "hf-eager"


def main(
    model: Annotated[str, typer.Option(help="A preset, a checkpoint folder or a GGUF file.")] = "smollm2-135m",
    prompts: Annotated[str, typer.Option(help="Tokens of the prompts, separated by commas.")] = "128,2000,7000",
    new: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 64,
    rounds: Annotated[int, typer.Option(min=2, help="Starts of each side and prompt, interleaved.")] = 3,
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Measure cold starts on this machine."""
    lengths, source = listed_counts("prompts", prompts, "numbers of tokens, such as 128,2000"), resolve(model)
    most = source.hf_config.max_position_embeddings
    if max(lengths) + new > most:
        raise UserError(
            f"got prompts of up to {max(lengths)} tokens and {new} new ones, expected at most {most} together"
        )
    count = threads or team_size()
    environment = read_environment(count)
    files = BenchFiles.of(machine_of(environment), "cold-start", output=output)
    llama_cpp = not llama_cpp_is_missing()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        paths = {VANILLA: Path(scratch), FUSED: Path(scratch)}
        write_checkpoint(source, getattr(torch, DTYPE), Path(scratch))
        if llama_cpp:
            paths[LLAMA_CPP] = stack.enter_context(converted(LLAMA_CPP, model, dtype=DTYPE, seed=0)) / FILE
        record = ColdStart(
            model=source.name,
            origin=source.origin,
            dtype=DTYPE,
            threads=count,
            new_tokens=new,
            environment=environment,
            runs_s=measure(paths, lengths, new, rounds, count),
        )
    files.finish([record], page(record))


def measure(
    paths: dict[str, Path], prompts: Sequence[int], new: int, rounds: int, threads: int
) -> dict[str, dict[int, tuple[tuple[float, ...], ...]]]:
    """The phases of every start in seconds, as in `ColdStart`. An untimed start of each side reads its files, and
    compiles what it has to.
    """
    cases = [(side, prompt) for side in paths for prompt in prompts]
    runs: dict[tuple[str, int], list[tuple[float, ...]]] = {case: [] for case in cases}
    with progress_bar(err) as follow:
        for side, path in paths.items():
            follow(0, rounds, f"{side} warms up")
            start(side, path, min(prompts), 2, threads)
        for done, order in zip(range(rounds), random_orders(len(cases)), strict=False):
            for place, (side, prompt) in enumerate(cases[index] for index in order):
                follow(done + place / len(cases), rounds, f"round {done + 1} of {rounds}: {side}, {prompt} tokens")
                runs[side, prompt].append(start(side, paths[side], prompt, new, threads))
        follow(rounds, rounds, "done")
    return {side: {prompt: tuple(runs[side, prompt]) for prompt in prompts} for side in paths}


def start(side: str, path: Path, prompt: int, new: int, threads: int) -> tuple[float, ...]:
    """The seconds of each phase of one start."""
    arguments = [side, str(path), str(prompt), str(new), str(threads)]
    if side == LLAMA_CPP:
        arguments.append(str(PEERS[LLAMA_CPP].packages()))
    begin = monotonic_ns()
    reply = run_child([sys.executable, "-P", "-m", WORKER, *arguments], f"{side} could not start")
    ends = json.loads(reply.splitlines()[-1])
    return tuple((end - before) / 1e9 for before, end in zip([begin, *ends], ends, strict=False))


def rows(record: ColdStart) -> Iterator[tuple[str, ...]]:
    """The rows of the page's table, prompt by prompt."""
    for prompt in record.runs_s[FUSED]:
        for side in record.runs_s:
            phases = record.phases_s(side, prompt)
            gain = "" if side == FUSED else str(record.ratio(side, FUSED, prompt))
            seconds = [f"{phases[phase]:.2f}" for phase in PHASES]
            yield str(prompt), side, *seconds, f"{sum(phases.values()):.2f}", gain


def page(record: ColdStart) -> str:
    """The Markdown page of a record."""
    count = len(next(iter(record.runs_s[FUSED].values())))
    return page_of(
        f"Cold starts on {record.environment.machine}",
        f"{record.model} ({record.origin}) in {record.dtype}, {record.threads} threads, {record.new_tokens} new greedy "
        f"tokens. Seconds from the command in a shell to the last token, medians of {count} rounds, in which each side "
        "starts once for each prompt, in random order. Files are in the page cache.",
        markdown_table(("prompt", "side", *PHASES, "whole", "side / fused"), rows(record)),
        "import: the start of Python and the imports of the library. transformers imports the model's class while it "
        "loads. load: until the model is ready. prompt: until the first token. tokens: all further ones.",
        record.environment.origin,
    )


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
