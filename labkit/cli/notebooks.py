"""`labkit notebooks`: a thin layer over `labkit.notebooks`."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

out = Console()

notebooks = typer.Typer(help="The notebooks that labkit brings along.")


@notebooks.callback(invoke_without_command=True)
def bare(call: typer.Context) -> None:
    if call.invoked_subcommand is None:
        list_notebooks()


@notebooks.command("list")
def list_notebooks() -> None:
    """Name the notebooks, for `labkit run NAME`, with the question of each."""
    from labkit.notebooks.carried import carried_notebooks, title

    table = Table(Column("name", no_wrap=True), "question")
    for name, path in carried_notebooks().items():
        table.add_row(Text(name), Text(title(path)))
    out.print(table)
