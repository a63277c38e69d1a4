"""`labkit lab`: a thin layer over `labkit.notebooks`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from labkit.cli.words import Command
from labkit.system.output_folder import RUNS
from labkit.system.shown import shown

MORE = "labkit.more"  # where the words behind -- are kept


class LabCommand(Command):
    """A command that takes a folder, if any, before `--`, and words for another program behind it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[MORE] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


def lab(
    call: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(
            help="Of the copies to work in, which are made where they are missing.",
            default_factory=lambda: Path(RUNS, "notebooks"),
            show_default="runs/notebooks",
        ),
    ],
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Open no browser: print the address alone.")] = False,
    port: Annotated[int | None, typer.Option(help="Of the server; by default 8888, or the next that is free.")] = None,
    ip: Annotated[
        str | None, typer.Option(help="Address that the server listens on; by default this machine's.")
    ] = None,
) -> None:
    """Open copies of the notebooks in JupyterLab, live; what follows -- goes to `jupyter lab`. Ctrl-C ends it.

    A copy that you changed or ran is left alone; the others follow labkit's own.
    """
    from labkit.notebooks.copies import copy_notebooks
    from labkit.notebooks.lab import lab_command
    from labkit.notebooks.start_page import write_start_page

    typer.echo(f"lab: {shown(str(copy_notebooks(folder)))}; Ctrl-C ends it")
    write_start_page(folder)
    command = lab_command(folder, browser=not no_browser, port=port, ip=ip, more=call.meta[MORE])
    sys.stdout.flush()
    os.execv(command[0], command)
