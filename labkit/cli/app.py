"""The commands of `labkit`. Each is loaded on first use, so that `labkit models` does not import the others.

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
from shutil import get_terminal_size
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from labkit import __version__
from labkit.cli.words import Command
from labkit.system.terminal import LEAST_WIDTH


@dataclass(frozen=True)
class Home:
    """The place of a command."""

    module: str  # in `labkit.cli`
    name: str  # of a function, or of a typer group, in the module
    words: str = "labkit.cli.words:Command"  # the class that parses its command line
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
        "sides": Home("sides", "sides"),
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
        "workshop": Home("workshop", "workshop"),
    },
    "Machine": {
        "launch": Home("launch", "launch", "typer.core:TyperCommand", settings={"allow_interspersed_args": False}),
        "tune": Home("tune", "tune"),
        "peers": Home("peers", "peers"),
    },
}
HOMES = {name: home for homes in PANELS.values() for name, home in homes.items()}


class Commands(dict[str, Any]):
    """The commands by name, loaded on first use."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(HOMES))

    def __getitem__(self, name: str) -> Any:
        command = super().__getitem__(name)
        if command is None:
            self[name] = command = _loaded(name)
        return command

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


class LabkitGroup(TyperGroup):
    """The group of all commands."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes | {"commands": Commands()})

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """In a narrow terminal, help texts are as wide as tables, so that names of options are not cut."""
        if get_terminal_size().columns < LEAST_WIDTH:
            rich_utils = import_module("typer.rich_utils")  # takes time, and few terminals are narrow
            vars(rich_utils)["MAX_WIDTH"] = LEAST_WIDTH
        return super().make_context(*arguments, **settings)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Lists the commands with their help texts, without importing their modules."""
        loaded = self.commands
        self.commands = {
            name: Command(name=name, help=_help(home), rich_help_panel=panel)
            for panel, homes in PANELS.items()
            for name, home in homes.items()
        }
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = loaded


def _help(home: Home) -> str | None:
    """The docstring of a command, from its source; or the help of a group, whose module is quick to import."""
    for node in _source(home.module).body:
        if isinstance(node, ast.FunctionDef) and node.name == home.name:
            return ast.get_docstring(node)
    text: str | None = getattr(import_module(f"labkit.cli.{home.module}"), home.name).info.help
    return text


@cache
def _source(module: str) -> ast.Module:
    return ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))


@cache
def _loaded(name: str) -> Any:
    """The command of click for a function or a typer group. Making it takes longer than many commands run."""
    home = HOMES[name]
    target = getattr(import_module(f"labkit.cli.{home.module}"), home.name)
    if not isinstance(target, typer.Typer):
        parser_module, _, parser = home.words.partition(":")
        app = typer.Typer(add_completion=False)
        parser_class = getattr(import_module(parser_module), parser)
        app.command(name, cls=parser_class, context_settings=dict(home.settings))(target)
        target = app
    command = typer.main.get_command(target)
    command.name = name
    return command


app = typer.Typer(
    cls=LabkitGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"labkit {__version__}")
        raise typer.Exit


@app.callback()
def labkit(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """Make transformer inference fast, and measure how fast it really is."""
