"""The reference of the command line, from what `--help` says."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from labkit.cli.app import app
from labkit.harness.compare.sides import SIDES


class Commands(SphinxDirective):
    """A section for each command of `labkit`, with a table of its arguments and options."""

    def run(self) -> list[nodes.Node]:
        lines = list(sections("labkit", typer.main.get_command(app)))
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def sections(name: str, command: Any) -> Iterator[str]:
    """The sections of a command and of the commands within it."""
    if command.name and name != "labkit":
        yield from (f"## {name}", "", inspect.cleandoc(command.help or ""), "", *table(command.params), "")
    if name == "labkit sides":
        yield from ("| side | device | weights | models | what it is |", "|---|---|---|---|---|")
        for row in SIDES.values():
            yield f"| `{row.name}` | {row.device} | {row.weights} | {row.models} | {row.sentence} |"
        yield ""
    for below, found in getattr(command, "commands", {}).items():
        yield from sections(f"{name} {below}", found)


def table(parameters: list[Any]) -> list[str]:
    rows = [f"| {spelt(each)} | {cell(each)} |" for each in parameters if "--help" not in each.opts]
    return ["| | |", "|---|---|", *rows] if rows else []


def spelt(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    return ", ".join(f"`{name if name.startswith('-') else name.upper()}`" for name in names)


def cell(parameter: Any) -> str:
    """What the option says, and its default where it is a plain value."""
    said = " ".join((getattr(parameter, "help", "") or "").split()).replace("|", "\\|")
    default = parameter.default
    told = isinstance(default, str | int | float) and not isinstance(default, bool) and default != ""
    return f"{said} Default: `{default}`." if told and "efault" not in said else said
