"""`labkit notebooks`: a thin layer over `labkit.notebooks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from labkit.cli.words import Command
from labkit.system.shown import shown
from labkit.system.terminal import terminal

out = terminal()

notebooks = typer.Typer(add_completion=False, help="List or copy the notebooks that labkit includes.")


@notebooks.callback(invoke_without_command=True)
def bare(call: typer.Context) -> None:
    if call.invoked_subcommand is None:
        list_notebooks()


@notebooks.command("list")
def list_notebooks() -> None:
    """List the notebooks with their names, for `labkit run NAME`, and their questions."""
    from labkit.notebooks.carried import carried_notebooks, title

    table = Table(Column("name", no_wrap=True), "question")
    for name, path in carried_notebooks().items():
        table.add_row(Text(name), Text(title(path)))
    out.print(table)


@notebooks.command("copy", cls=Command)
def copy(folder: Annotated[Path, typer.Argument(help="Folder for the copies; made if missing.")]) -> None:
    """Copy the notebooks into a folder. A copy that you changed or ran there stays."""
    from labkit.notebooks.copies import copy_notebooks

    typer.echo(shown(str(copy_notebooks(folder))))
