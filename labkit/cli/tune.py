"""`labkit tune`: a thin layer over `labkit.harness.regions`."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from labkit.system.progress import progress_bar
from labkit.system.terminal import terminal

if TYPE_CHECKING:
    from labkit.statistics import Ratio

out = terminal()
err = terminal(stderr=True)


def tune(
    model: Annotated[
        list[str] | None, typer.Option(help="A preset; may be repeated. Default: gpt-j-6b, on a CPU gpt2.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="A precision; may be repeated. Default: float16, on a CPU float32.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="A batch size; may be repeated. Default: 1.")] = None,
) -> None:
    """Find the fastest tiles of the Triton kernels on this GPU, and keep them for later runs.

    Without a GPU: show the time of a decode step for each way to read the weights. Engines choose among these ways as
    they run.
    """
    from labkit.kernels import gpu

    if gpu.unavailable():
        for case in product(model or ["gpt2"], dtype or ["float32"], batch or [1]):
            _show_ways(*case)
        return
    from labkit.harness.regions.tune import tune as run_tuning

    with progress_bar(err) as follow:
        path, tuned = run_tuning(
            tuple(model or ("gpt-j-6b",)),
            dtypes=tuple(dtype or ("float16",)),
            batches=tuple(batch or (1,)),
            progress=follow,
        )
    table = Table("kernel", "tile", Column("step before", justify="right"), Column("after", justify="right"))
    for kernel in tuned:
        tile = f"{kernel.tile.rows} x {kernel.tile.depth}, {kernel.tile.warps} warps, {kernel.tile.stages} stages"
        table.add_row(kernel.key, tile, f"{kernel.before_us:,.0f} µs", f"{kernel.after_us:,.0f} µs")
    out.print(table)
    out.print(str(path), soft_wrap=True, markup=False)


def _show_ways(model: str, dtype: str, batch: int) -> None:
    from labkit.harness.regions.tune_cpu import time_ways

    with progress_bar(err) as follow:
        ways = time_ways(model, dtype=dtype, batch=batch, progress=follow)
    fastest = min(way.step_ms for way in ways)
    streams = sorted(ways[0].read_gb_s)
    columns = [
        Column(name, justify="right") for name in ("a step", "over none [95 %]", *(f"GB/s x{n}" for n in streams))
    ]
    table = Table("way to read", *columns, title=f"{model}, {dtype}, batch {batch}", title_justify="left")
    for way in ways:
        rates = [f"{way.read_gb_s[count]:.1f}" for count in streams]
        style = "bold" if way.step_ms == fastest else None
        table.add_row(way.name, f"{way.step_ms:.2f} ms", _over(way.over_none), *rates, style=style)
    out.print(table)
    out.print("GB/s xN: a plain reader with N streams per thread; the highest is the limit")


def _over(ratio: Ratio) -> str:
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
