"""`labkit kernels`: a thin layer over `labkit.harness.regions` and `labkit.harness.exchange`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from labkit.cli.measuring import AsJson, Output, Threads, WaitQuiet, Width, fraction
from labkit.system.asked_from import setting
from labkit.system.errors import UserError
from labkit.system.progress import progress_bar
from labkit.system.terminal import terminal

out = terminal()
err = terminal(stderr=True)
OF_REGIONS = ("impl", "model", "dtype", "batch", "context", "threads", "budget_s", "precision")  # not of all_reduce
OF_SUMS = ("ranks",)  # options of all_reduce alone


def kernels(
    call: typer.Context,
    op: Annotated[
        list[str] | None,
        typer.Option(help="qkv, attention, attn_out, mlp, mlp_out or residual, may be repeated; or all_reduce."),
    ] = None,
    impl: Annotated[str, typer.Option(help="cpp, or triton on a GPU.")] = "cpp",
    model: Annotated[str, typer.Option(help="The shape of a layer: a preset or a checkpoint folder.")] = "gpt2",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or int8.")] = "float32",
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens of each sequence in the KV cache.")] = 128,
    threads: Threads = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="A fixed number of epochs, each of some rounds; for all_reduce of rounds, then 15."),
    ] = None,
    budget_s: Annotated[
        float | None,
        typer.Option(help="Measure until each gain is decided, for this long at most; without --rounds 30."),
    ] = None,
    precision: Width = None,
    ranks: Annotated[int, typer.Option(help="Processes that all_reduce sums over, each on one core.")] = 2,
    wait_quiet: WaitQuiet = None,
    *,
    output: Output,
    as_json: AsJson = False,
) -> None:
    """Measure each fused region of a layer against its unfused ops, or the sums over ranks."""
    ops = op or []
    sums = "all_reduce" in ops
    if useless := [name for name in (OF_REGIONS if sums else OF_SUMS) if _is_given(call, name)]:
        expected = (
            "all_reduce runs no model: leave it out" if sums else "only --op all_reduce runs on ranks: leave it out"
        )
        raise UserError(f"got {', '.join(map(setting, useless))}; {expected}")
    if sums:
        _all_reduce(ops, ranks, rounds, wait_quiet, output, as_json)
        return
    from labkit.harness.regions.measure import measure_regions, save_regions
    from labkit.harness.regions.table import region_table

    with progress_bar(err) as follow:
        rows = measure_regions(
            model,
            regions=op,
            rounds=rounds,
            budget_s=budget_s,
            precision=fraction("precision", precision),
            wait_quiet_s=wait_quiet,
            output=output,
            progress=follow,
            impl=impl,
            dtype=dtype,
            batch=batch,
            context=context,
            threads=threads,
        )
    _show(rows, region_table, as_json)
    save_regions(rows, output)  # last, so that the result is shown even if it cannot be saved


def _all_reduce(
    ops: list[str], ranks: int, rounds: int | None, wait_quiet: float | None, output: Path, as_json: bool
) -> None:
    from labkit.harness.exchange.measure import ROUNDS, measure_exchange, save_exchange
    from labkit.harness.exchange.table import exchange_table

    if others := sorted(set(ops) - {"all_reduce"}):
        raise UserError(f"got --op all_reduce with {', '.join(others)}, expected it alone: it runs on several ranks")
    with progress_bar(err) as follow:
        number = ROUNDS if rounds is None else rounds
        rows = measure_exchange(ranks, rounds=number, wait_quiet_s=wait_quiet, output=output, progress=follow)
    _show(rows, exchange_table, as_json)
    save_exchange(rows, output)


def _is_given(call: typer.Context, option: str) -> bool:
    source = call.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def _show(rows: Sequence[Any], table: Callable[[Any], RenderableType], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"rows": [row.as_dict() for row in rows]}))
    else:
        out.print(table(rows))
