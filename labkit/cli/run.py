"""`labkit run`: a thin layer over `labkit.notebooks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from labkit.cli.measuring import output_option
from labkit.system.errors import UserError
from labkit.system.progress import progress_bar
from labkit.system.shown import shown, shown_lines
from labkit.system.terminal import terminal

err = terminal(stderr=True)


def run(
    context: typer.Context,
    notebook: Annotated[Path, typer.Argument(help="A file, or a name from `labkit notebooks`.")],
    *,
    output: Annotated[Path, output_option("Folder for the executed notebook and its HTML report.")],
    timeout: Annotated[float | None, typer.Option(help="Seconds that a cell may take; by default no limit.")] = None,
) -> None:
    """Execute a notebook with parameters (`-p NAME VALUE` each), and write an HTML report."""
    from labkit.notebooks import run_notebook

    parameters = _pairs(context.args)
    with progress_bar(err) as follow:
        report = run_notebook(notebook, parameters, output, follow, timeout_s=timeout)
    for headline in report.headlines:
        typer.echo(shown_lines(headline))
    typer.echo(f"{report.status} in {report.seconds:.0f} s: {shown(str(report.html))}")
    if report.failure:
        err.print(escape(str(report.failure)), style="red", highlight=False)
        raise typer.Exit(1)


def _pairs(arguments: list[str]) -> dict[str, str]:
    """The parameters from repeated `-p NAME VALUE`. UserError for anything else."""
    pairs: dict[str, str] = {}
    for start in range(0, len(arguments), 3):
        flag, *pair = arguments[start : start + 3]
        if flag not in ("-p", "--parameters") or len(pair) != 2:
            raise UserError(f"got {' '.join([flag, *pair])!r}, expected -p NAME VALUE")
        if pair[0] in pairs:
            raise UserError(f"the parameter {pair[0]!r} is given twice; give it once")
        pairs[pair[0]] = pair[1]
    return pairs
