"""The commands of `labkit`, each loaded when it is asked for: `labkit models` waits for no other.

Results go to stdout, progress and remarks to stderr. Exit code 2: the request cannot be served as it stands; 1: it
failed on the way; 130: Ctrl-C.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from labkit import __version__
from labkit.cli.words import Command


@dataclass(frozen=True)
class Home:
    """The place of a command: a function of a module of `labkit.cli`, or a group. words: what reads its line."""

    module: str
    name: str
    words: str = "labkit.cli.words:Command"
    settings: Mapping[str, Any] = field(default_factory=dict)


MEASURING = "labkit.cli.measuring:MeasuringCommand"
MORE_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True}
PANELS = {
    "Talk": {
        "generate": Home("generate", "generate"),
        "chat": Home("chat", "chat"),
        "models": Home("models", "models"),
    },
    "Measure": {
        "compare": Home("compare", "compare", MEASURING),
        "kernels": Home("kernels", "kernels", MEASURING),
        "evaluate": Home("evaluate", "evaluate"),
        "diff": Home("diff", "diff"),
        "plan-batch": Home("plan_batch", "plan_batch"),
        "bench-methods": Home("methods", "bench_methods", MEASURING),
    },
    "Profile": {
        "profile": Home("trace", "profile"),
        "trace": Home("traces", "trace"),
        "timeline": Home("trace", "timeline"),
        "stages": Home("trace", "stages"),
        "explain": Home("trace", "explain"),
        "doctor": Home("trace", "doctor"),
    },
    "Lab": {
        "lab": Home("lab", "lab", "labkit.cli.lab:LabCommand"),
        "run": Home("run", "run", settings=MORE_WORDS),
        "notebooks": Home("notebooks", "notebooks"),
    },
    "Machine": {
        "launch": Home("launch", "launch", "typer.core:TyperCommand", settings={"allow_interspersed_args": False}),
        "tune": Home("tune", "tune"),
        "peers": Home("peers", "peers"),
    },
}
HOMES = {name: home for homes in PANELS.values() for name, home in homes.items()}


class Commands(dict[str, Any]):
    """The commands by name."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(HOMES))

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if found is None:
            self[name] = found = _loaded(name, HOMES[name])
        return found

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


class LabkitGroup(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes | {"commands": Commands()})

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The list of commands needs what they say, and not what they import."""
        loaded = self.commands
        self.commands = {
            name: Command(name=name, help=_says(home), rich_help_panel=panel)
            for panel, homes in PANELS.items()
            for name, home in homes.items()
        }
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = loaded


def _says(home: Home) -> str | None:
    """The docstring of a command, from its source; the help of a group, whose module imports little."""
    for node in _source(home.module).body:
        if isinstance(node, ast.FunctionDef) and node.name == home.name:
            return ast.get_docstring(node)
    says: str | None = getattr(import_module(f"labkit.cli.{home.module}"), home.name).info.help
    return says


@cache
def _source(module: str) -> ast.Module:
    return ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))


def _loaded(name: str, home: Home) -> Any:
    found = getattr(import_module(f"labkit.cli.{home.module}"), home.name)
    if not isinstance(found, typer.Typer):
        module, _, words = home.words.partition(":")
        alone = typer.Typer(add_completion=False)
        alone.command(name, cls=getattr(import_module(module), words), context_settings=dict(home.settings))(found)
        found = alone
    command = typer.main.get_command(found)
    command.name = name
    return command


app = typer.Typer(
    cls=LabkitGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"labkit {__version__}")
        raise typer.Exit


@app.callback()
def labkit(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """Make transformer inference fast, and measure how fast it really is."""
