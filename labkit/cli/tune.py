"""`labkit tune`: a thin layer over `labkit.harness.regions`."""

from __future__ import annotations

from itertools import product
from typing import Annotated

import typer
from rich.table import Column, Table

from labkit.system.progress import progress_bar
from labkit.system.terminal import terminal

out = terminal()
err = terminal(stderr=True)


def tune(
    model: Annotated[
        list[str] | None, typer.Option(help="A preset; may be given again. Default: gpt-j-6b, on a CPU gpt2.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="May be given again. Default: float16, on a CPU float32.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="May be given again. Default: 1.")] = None,
) -> None:
    """Find the fastest tiles of the Triton kernels on this GPU and keep them for all later runs. Without a GPU, show
    how long a decode step takes with each way to read the weights, among which engines choose as they run.
    """
    from labkit.kernels import gpu

    if gpu.unavailable():
        for case in product(model or ["gpt2"], dtype or ["float32"], batch or [1]):
            _show_ways(*case)
        return
    from labkit.harness.regions.tune import tune as run_tuning

    with progress_bar(err) as follow:
        path, found = run_tuning(
            tuple(model or ("gpt-j-6b",)),
            dtypes=tuple(dtype or ("float16",)),
            batches=tuple(batch or (1,)),
            progress=follow,
        )
    table = Table("kernel", "tile", Column("step before", justify="right"), Column("after", justify="right"))
    for each in found:
        tile = f"{each.tile.rows} x {each.tile.depth}, {each.tile.warps} warps, {each.tile.stages} stages"
        table.add_row(each.key, tile, f"{each.before_us:,.0f} µs", f"{each.after_us:,.0f} µs")
    out.print(table)
    out.print(str(path), soft_wrap=True, markup=False)


def _show_ways(model: str, dtype: str, batch: int) -> None:
    from labkit.harness.regions.tune_cpu import time_ways

    with progress_bar(err) as follow:
        found = time_ways(model, dtype=dtype, batch=batch, progress=follow)
    fastest = min(way.step_ms for way in found)
    streams = sorted(found[0].read_gb_s)
    columns = [Column(name, justify="right") for name in ("a step", "over none", *(f"GB/s x{n}" for n in streams))]
    table = Table("way to read", *columns, title=f"{model}, {dtype}, batch {batch}", title_justify="left")
    for way in found:
        rates = [f"{way.read_gb_s[count]:.1f}" for count in streams]
        style = "bold" if way.step_ms == fastest else None
        table.add_row(way.name, f"{way.step_ms:.2f} ms", f"{way.over_none:.3f}", *rates, style=style)
    out.print(table)
    out.print("GB/s xN: a plain reader in N streams for each thread; the highest is the limit")
