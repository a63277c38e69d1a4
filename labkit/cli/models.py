"""`labkit models`: a thin layer over `labkit.models.presets` and `labkit.engine.levels`."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated

import typer
from rich.table import Column, Table

from labkit.models.preset_sizes import PRESET_SIZES, PresetSize
from labkit.system.errors import UserError
from labkit.system.progress import progress_bar
from labkit.system.shown import shown
from labkit.system.terminal import terminal

out, err = terminal(), terminal(stderr=True)

# The end of every architecture's name. Without it the table fits a terminal of 80 columns.
HEADS = re.compile("(ForCausalLM|LMHeadModel)$")


def models(
    model: Annotated[
        str | None,
        typer.Argument(help="A preset, folder, GGUF file or hub id, or a class of transformers such as granite."),
    ] = None,
    all_classes: Annotated[
        bool, typer.Option("--all", help="All causal language models of transformers; takes minutes.")
    ] = False,
) -> None:
    """List the presets, or show how much of a model runs on labkit's kernels."""
    if model is not None and all_classes:
        raise UserError(f"got both {model} and --all; give one of them")
    if model is None and not all_classes:
        _presets()
        return
    from labkit.engine.levels import HOOKS, all_levels, config_of_class, level_of

    if all_classes:
        table = Table(Column("class", no_wrap=True), Column("level", no_wrap=True), "why no higher level")
        counts: Counter[str] = Counter()
        with progress_bar(err) as follow:
            for level in all_levels(follow):
                table.add_row(shown(HEADS.sub("", level.architecture)), level.level, shown(level.why))
                counts[level.level] += 1
        out.print(table)
        out.print(", ".join(f"{count} {name}" for name, count in counts.items()))
        return
    assert model is not None
    from labkit.weights.resolve import resolve

    config = config_of_class(model) or resolve(model, any_architecture=True).hf_config
    level = level_of(config)
    out.print(f"{shown(level.architecture)}: {level.level}", style="bold")
    if level.why:
        out.print(f"no row: {shown(level.why)}")
    if level.level == HOOKS:
        out.print("in a small model of the class:")
    for fact in level.facts:
        out.print(shown(fact))


def _presets() -> None:
    table = Table(Column("name", no_wrap=True), Column("family", no_wrap=True))
    for column in PresetSize._fields[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    for name, size in PRESET_SIZES.items():
        counts = (f"{count:,}" for count in size[1:-1])
        table.add_row(name, HEADS.sub("", size.architecture), *counts, _brief(size.parameters))
    out.print(table)


def _brief(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
