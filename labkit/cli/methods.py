"""`labkit bench-methods`: a thin layer over `labkit.harness.methods`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from labkit.cli.measuring import AsJson, Dtype, MemoryGb, Model, Threads, WaitQuiet, output_option
from labkit.system.asked_from import setting
from labkit.system.comma_list import listed
from labkit.system.errors import UserError
from labkit.system.output_folder import check_output_folder
from labkit.system.progress import progress_bar
from labkit.system.terminal import terminal
from labkit.system.whole_file import check_output_file, check_two_outputs, write_whole

out = terminal()
err = terminal(stderr=True)


def bench_methods(
    model: Model,
    methods: Annotated[
        str,
        typer.Option(help="Sides of `labkit compare` (with -tp2: on two ranks) and accelerate-int8, with commas."),
    ] = "hf-eager,accelerate,accelerate-int8,fused,fused-tp2,fused-int8,fused-streamed",
    batch: Annotated[str, typer.Option(help="Batch sizes: numbers with commas.")] = "1,2,4",
    dtype: Dtype = "float32",
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    new: Annotated[int, typer.Option(help="Tokens to generate.")] = 100,
    memory_gb: MemoryGb = None,
    threads: Threads = None,
    rounds: Annotated[
        int,
        typer.Option(help="Epochs of turns of a few tokens for each cell; with --memory-gb, timed calls."),
    ] = 6,
    seed: Annotated[int, typer.Option(help="Seed of random weights and prompts.")] = 0,
    scratch: Annotated[
        Path | None,
        typer.Option(help="Folder for models that are read during a run. Default: the folder for temporary files."),
    ] = None,
    page: Annotated[Path | None, typer.Option(help="File for the tables as Markdown.")] = None,
    wait_quiet: WaitQuiet = None,
    *,
    output: Annotated[
        Path, output_option("File of JSON lines; cells that it has are not measured again.", "methods.jsonl")
    ],
    as_json: AsJson = False,
) -> None:
    """Measure several ways to run a model at several batch sizes, next to the table of the articles about BLOOM."""
    from labkit.harness.methods.bench import bench_methods as run_bench

    check_two_outputs(page=page, output=output)
    if page is not None:
        check_output_file(page)
        check_output_folder(page.parent, what="tables", option=setting("page"))
    with progress_bar(err) as follow:
        grid = run_bench(
            model,
            output=output,
            methods=listed(methods),
            batches=[_number(size) for size in listed(batch)],
            dtype=dtype,
            prompt=prompt,
            new=new,
            memory_gb=memory_gb,
            threads=threads,
            rounds=rounds,
            seed=seed,
            wait_quiet_s=wait_quiet,
            scratch=scratch,
            progress=follow,
        )
    if as_json:
        typer.echo(json.dumps({"cells": [cell.as_dict() for cell in grid.cells]}))
    else:
        for table in grid.tables():
            out.print(table)
    if page is not None:
        write_whole(page, grid.page())


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"got --batch {text!r}, expected numbers with commas between them, such as 1,2,4") from None
