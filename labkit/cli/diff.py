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
    before: Annotated[Path, typer.Argument(help=f"Earlier results: {RECORDS}")],
    after: Annotated[Path, typer.Argument(help=f"Later results: {RECORDS}")],
    metric: Annotated[str, typer.Option(help="per_token, ttft or end_to_end.")] = "per_token",
    tolerance: Annotated[float, typer.Option(help="Smallest change that counts, a fraction.")] = 0.05,
    across_machines: Annotated[
        bool, typer.Option("--across-machines", help="Compare two machines instead of two versions.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two files of saved results: what became faster or slower.

    Turns of a few tokens are compared at equal rates of the memory.

    Exit code 1: something is SLOWER; 0: nothing is.
    """
    from labkit.harness.diff.diff_records import diff_records
    from labkit.statistics import Verdict

    comparison = diff_records(before, after, metric=metric, tolerance=tolerance, across_machines=across_machines)
    if as_json:
        typer.echo(json.dumps(comparison.as_dict()))
    else:
        out.print(comparison)
    if comparison.of(Verdict.SLOWER):
        raise typer.Exit(1)
