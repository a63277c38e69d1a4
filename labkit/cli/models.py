"""`labkit models`: a thin layer over `labkit.models.presets` and `labkit.engine.levels`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from labkit.models.preset_sizes import PRESET_SIZES, PresetSize
from labkit.system.errors import UserError
from labkit.system.markdown import as_text, markdown_table
from labkit.system.progress import progress_bar
from labkit.system.shown import shown
from labkit.system.terminal import terminal
from labkit.system.whole_file import check_output_file, write_whole

if TYPE_CHECKING:
    from labkit.engine.levels import Level

out, err = terminal(), terminal(stderr=True)

# The end of every architecture's name. Without it the table fits a terminal of 80 columns.
HEADS = re.compile("(ForCausalLM|LMHeadModel)$")
LONGEST_REASON = 160  # letters of a reason on the page of all classes


def models(
    model: Annotated[
        str | None,
        typer.Argument(help="A preset, folder, GGUF file or hub id, or a class of transformers such as granite."),
    ] = None,
    all_classes: Annotated[
        bool, typer.Option("--all", help="All causal language models of transformers; takes minutes.")
    ] = False,
    page: Annotated[Path | None, typer.Option(help="File for the table of --all as Markdown.")] = None,
) -> None:
    """List the presets, or show how much of a model runs on labkit's kernels."""
    if model is not None and all_classes:
        raise UserError(f"got both {model} and --all; give one of them")
    if page is not None:
        if not all_classes:
            raise UserError("--page takes the table of --all; add --all")
        check_output_file(page)
    if model is None and not all_classes:
        _presets()
        return
    from labkit.engine.levels import all_levels, config_of_class, level_of
    from labkit.models.level_names import HOOKS

    if all_classes:
        with progress_bar(err) as follow:
            levels = list(all_levels(follow))
        table = Table(Column("class", no_wrap=True), Column("level", no_wrap=True), "why no higher level")
        for level in levels:
            table.add_row(shown(HEADS.sub("", level.architecture)), level.level, shown(level.why))
        out.print(table)
        out.print(_counts(levels))
        if page is not None:
            write_whole(page, _page(levels))
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


def _counts(levels: Sequence[Level]) -> str:
    counts = Counter(level.level for level in levels)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def _page(levels: Sequence[Level]) -> str:
    """The table of all classes, as a page of the documentation."""
    import transformers

    rows = [
        (f"`{level.model_type}`", level.level, as_text(shorten(level.why, LONGEST_REASON, placeholder=" …")))
        for level in levels
    ]
    return "\n\n".join(
        (
            "# All causal models of transformers",
            f"`labkit models --all --page FILE` made this table with transformers {transformers.__version__}, from a "
            "small random model of each class, with the switches of its default config. [Models](models.md) says what "
            "the levels are. Another config of a class may get another level: `labkit models MODEL` says which.",
            f"{_counts(levels)}. A level of none means that such a model fails in transformers' own code, or that its "
            "results would change with packed parts.",
            markdown_table(("model type", "level", "why no higher level"), rows) + "\n",
        )
    )


def _presets() -> None:
    table = Table(Column("name", no_wrap=True), Column("family", no_wrap=True), show_edge=False)
    for column in PresetSize._fields[1:]:
        table.add_column(column.replace("vocabulary", "vocab"), justify="right", no_wrap=True)
    for name, size in PRESET_SIZES.items():
        counts = (f"{count:,}" for count in size[1:-1])
        table.add_row(name, HEADS.sub("", size.architecture), *counts, _brief(size.parameters))
    out.print(table)


def _brief(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
