"""`labkit notebooks`: a thin layer over `labkit.notebooks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from labkit.system.shown import shown
from labkit.system.terminal import terminal

out = terminal()

notebooks = typer.Typer(help="The notebooks that labkit brings along: list them, copy them.")


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


@notebooks.command("copy")
def copy(folder: Annotated[Path, typer.Argument(help="Where to; it need not be there.")]) -> None:
    """Copy the notebooks into a folder. One that you changed or ran there is left alone."""
    from labkit.notebooks.copies import copy_notebooks

    typer.echo(shown(str(copy_notebooks(folder))))
