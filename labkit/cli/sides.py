"""`labkit sides`: a thin layer over `labkit.harness.compare.sides`."""

from __future__ import annotations

import json

import typer
from rich.table import Column, Table

from labkit.cli.measuring import AsJson
from labkit.harness.compare.sides import MODELS, SIDES, WEIGHTS
from labkit.system.terminal import terminal

SHOWN = ("name", "sentence", "device", "weights", "models", "needs")  # fields of a side in JSON
out = terminal()


def sides(*, as_json: AsJson = False) -> None:
    """List the sides: every way to run a model that `labkit compare` can measure."""
    if as_json:
        typer.echo(json.dumps({"sides": [{name: getattr(row, name) for name in SHOWN} for row in SIDES.values()]}))
        return
    names = (Column(name, no_wrap=True) for name in ("side", "device", "weights", "models"))
    table = Table(*names, "what it is", box=None, pad_edge=False)
    for row in SIDES.values():
        table.add_row(row.name, row.device, row.weights, row.models, row.sentence)
    out.print(table)
    notes = [f"{word}: weights {meaning}" for word, meaning in WEIGHTS.items()]
    notes += [f"{word}: {meaning}" for word, meaning in MODELS.items()]
    for needs in dict.fromkeys(row.needs for row in SIDES.values() if row.needs):
        notes.append(f"{needs}: for {', '.join(row.name for row in SIDES.values() if row.needs == needs)}")
    out.print("", *notes, sep="\n", highlight=False, soft_wrap=True)
