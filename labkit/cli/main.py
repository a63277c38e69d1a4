"""The command line: a thin layer over `labkit.harness`, `labkit.conversation`, `labkit.models.presets` and
`labkit.notebooks`.

Results go to stdout, progress and remarks to stderr. Exit code 2: the request cannot be served as it stands; 1: it
failed on the way; 130: Ctrl-C.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from labkit import __version__
from labkit.cli import launch as launch_cli
from labkit.cli import trace as trace_cli
from labkit.cli.chat import chat
from labkit.cli.compare import compare
from labkit.cli.diff import diff
from labkit.cli.evaluate import evaluate
from labkit.cli.generate import generate
from labkit.cli.kernels import kernels
from labkit.cli.lab import LabCommand, lab
from labkit.cli.measuring import MeasuringCommand, output_option
from labkit.cli.methods import bench_methods
from labkit.cli.notebooks import notebooks
from labkit.cli.peers import peers
from labkit.cli.plan_batch import plan_batch
from labkit.cli.traces import trace
from labkit.system.command import run_command
from labkit.system.errors import UserError
from labkit.system.progress import progress_bar

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console()
err = Console(stderr=True)

for measuring in (compare, kernels, bench_methods):
    app.command(cls=MeasuringCommand)(measuring)
for plain in (diff, evaluate, plan_batch, generate, chat):
    app.command()(plain)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"labkit {__version__}")
        raise typer.Exit


@app.callback()
def labkit(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """Make transformer inference fast, and measure how fast it really is."""


@app.command()
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


@app.command()
def models() -> None:
    """List the presets: the shapes that `compare` and `generate` know by name."""
    import torch

    from labkit.models.policies import model_config_of
    from labkit.models.presets import PRESETS

    table = Table(Column("name", no_wrap=True), Column("architecture", overflow="ellipsis"))
    for size in ("layers", "hidden", "heads", "vocabulary", "parameters"):
        table.add_column(size, justify="right")
    for name, preset in PRESETS.items():
        config = model_config_of(preset.hf_config)
        sizes = (config.num_layers, config.hidden_size, config.num_heads, config.vocab_size)
        millions = config.weight_bytes(torch.int8) / 1e6
        table.add_row(name, config.architecture, *(f"{size:,}" for size in sizes), f"{millions:,.1f} M")
    out.print(table)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    notebook: Annotated[Path, typer.Argument(help="A file, or a name as `labkit notebooks` lists it.")],
    *,
    output: Annotated[Path, output_option("Folder for the executed notebook and its HTML report.")],
    timeout: Annotated[float | None, typer.Option(help="Seconds that a cell may take; by default no limit.")] = None,
) -> None:
    """Execute a notebook with parameters, each given as `-p NAME VALUE`, and write one HTML report."""
    from labkit.notebooks import run_notebook

    parameters = _pairs(context.args)
    with progress_bar(err) as follow:
        report = run_notebook(notebook, parameters, output, follow, timeout_s=timeout)
    for headline in report.headlines:
        typer.echo(headline)
    typer.echo(f"{report.status} in {report.seconds:.0f} s: {report.html}")
    if report.failure:
        err.print(escape(str(report.failure)), style="red", highlight=False)
        raise typer.Exit(1)


for command in (trace_cli.profile, trace_cli.doctor, trace_cli.stages, trace_cli.explain, trace_cli.timeline):
    app.command()(command)
app.add_typer(peers, name="peers")
app.add_typer(trace, name="trace")
app.add_typer(notebooks, name="notebooks")
app.command(cls=LabCommand)(lab)
app.command(context_settings={"allow_interspersed_args": False})(launch_cli.launch)


def main() -> None:
    """The `labkit` command."""
    run_command(app)


def _pairs(arguments: list[str]) -> dict[str, str]:
    """`-p NAME VALUE` repeated; ValueError shows what was expected where something else stands."""
    pairs: dict[str, str] = {}
    for at in range(0, len(arguments), 3):
        flag, *pair = arguments[at : at + 3]
        if flag not in ("-p", "--parameters") or len(pair) != 2:
            raise UserError(f"got {' '.join([flag, *pair])!r}, expected -p NAME VALUE")
        if pair[0] in pairs:
            raise UserError(f"the parameter {pair[0]!r} is given twice; give it once")
        pairs[pair[0]] = pair[1]
    return pairs
