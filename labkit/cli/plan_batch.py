"""`labkit plan-batch`: a thin layer over `labkit.harness.streaming`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labkit.cli.measuring import AsJson, Model, Output, Precision, Threads
from labkit.system.errors import UserError
from labkit.system.progress import progress_bar
from labkit.system.terminal import terminal

if TYPE_CHECKING:
    from labkit.harness.streaming.plan import StreamingPlan

out = terminal()
err = terminal(stderr=True)


def plan_batch(
    model: Model,
    memory_gb: Annotated[float, typer.Option(help="GB (1e9 bytes) for weights, slots, cache and workspace together.")],
    dtype: Precision = "bfloat16",
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    new: Annotated[int, typer.Option(help="Tokens to generate.")] = 32,
    slots: Annotated[int, typer.Option(help="Offloaded layers that are in memory at a time.")] = 3,
    threads: Threads = None,
    path: Annotated[
        Path | None, typer.Option(help="Folder on the disk for offloaded layers. Default: labkit's cache.")
    ] = None,
    disk_gb_s: Annotated[float | None, typer.Option(help="GB/s of another disk. Default: probe this one.")] = None,
    gflops: Annotated[float | None, typer.Option(help="GFLOP/s of another processor. Default: probe this one.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Generate with growing batches until one gives no more tokens per second.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(help="With --measure: epochs of each batch. Default: 3, the fewest that are trusted."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random weights and prompts.")] = 0,
    *,
    output: Output,
    as_json: AsJson = False,
) -> None:
    """Choose a batch size for weights that are streamed from a disk: the largest that fits, and the fastest."""
    from labkit.harness.results import save
    from labkit.harness.streaming.make import plan_streaming
    from labkit.harness.streaming.measured import EPOCHS_OF_BATCH, measured_plan
    from labkit.system.output_folder import check_output_folder

    if measure and (disk_gb_s is not None or gflops is not None):
        raise UserError("got --measure with the rates of another machine; expected --measure or the rates, not both")
    if rounds is not None and not measure:
        raise UserError(f"got --rounds {rounds} without --measure; a prediction has no epochs, so leave it out")
    check_output_folder(output)
    with progress_bar(err) as follow:
        follow(0, 1, "probing the disk and the processor")
        plan = plan_streaming(
            model,
            memory_gb=memory_gb,
            precision=dtype,
            prompt=prompt,
            new=new,
            slots=slots,
            threads=threads,
            path=path,
            disk_gb_s=disk_gb_s,
            gflop_s=gflops,
            seed=seed,
        )
        if measure:
            plan, _ = measured_plan(
                plan, path=path, seed=seed, rounds=EPOCHS_OF_BATCH if rounds is None else rounds, progress=follow
            )
    if as_json:
        typer.echo(json.dumps(plan.as_dict()))
    else:
        _print_tables(plan)
    save(plan, output)  # last, so that the result is shown even if it cannot be saved


def _print_tables(plan: StreamingPlan) -> None:
    from labkit.harness.streaming.table import measured_table, predicted_table, trade_table

    for table in (predicted_table, *((measured_table,) if plan.points else ()), trade_table):
        out.print(table(plan))
