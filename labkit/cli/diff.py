"""`labkit diff`: a thin layer over `labkit.harness.diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from labkit.cli.measuring import AsJson
from labkit.system.terminal import terminal

out = terminal()
RECORDS = "a file of JSON lines, or a folder of such files."


def diff(
    before: Annotated[Path, typer.Argument(help=f"What was measured before: {RECORDS}")],
    after: Annotated[Path, typer.Argument(help=f"What was measured since: {RECORDS}")],
    metric: Annotated[str, typer.Option(help="per_token, ttft or end_to_end.")] = "per_token",
    tolerance: Annotated[float, typer.Option(help="A change counts from this fraction on.")] = 0.05,
    across_machines: Annotated[
        bool, typer.Option("--across-machines", help="Compare the times of two machines, not of two versions.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two files of results: what is faster, what slower. Exit code 1: something is SLOWER; 0: nothing is."""
    from labkit.harness.diff.diff_records import diff_records
    from labkit.statistics import Verdict

    found = diff_records(before, after, metric=metric, tolerance=tolerance, across_machines=across_machines)
    if as_json:
        typer.echo(json.dumps(found.as_dict()))
    else:
        out.print(found)
    if found.of(Verdict.SLOWER):
        raise typer.Exit(1)
