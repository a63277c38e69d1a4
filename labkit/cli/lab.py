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

MORE = "labkit.more"  # key of the words after --


class LabCommand(Command):
    """A command that takes an optional folder, then `--` and words for another program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[MORE] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


def lab(
    call: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder of the copies to work in. Missing copies are made.",
            default_factory=lambda: Path(RUNS, "notebooks"),
            show_default="runs/notebooks",
        ),
    ],
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address, open no browser.")] = False,
    port: Annotated[int | None, typer.Option(help="Port of the server; by default 8888, or the next free one.")] = None,
    ip: Annotated[
        str | None, typer.Option(help="Address that the server listens on; by default this machine's.")
    ] = None,
) -> None:
    """Open copies of the notebooks in JupyterLab.

    A copy that you changed or ran stays; other copies are updated to labkit's own. Words after -- go to `jupyter lab`.
    Ctrl-C ends it.
    """
    from labkit.notebooks.copies import copy_notebooks
    from labkit.notebooks.lab import lab_command, write_start_page

    typer.echo(f"lab: {shown(str(copy_notebooks(folder)))}; Ctrl-C ends it")
    write_start_page(folder)
    command = lab_command(folder, browser=not no_browser, port=port, ip=ip, more=call.meta[MORE])
    sys.stdout.flush()
    os.execv(command[0], command)
