"""`labkit models`: a thin layer over `labkit.models.presets`."""

from __future__ import annotations

import re

from rich.table import Column, Table

from labkit.models.preset_sizes import PRESET_SIZES, PresetSize
from labkit.system.terminal import terminal

out = terminal()

# The end of every architecture's name. Without it the table fits a terminal of 80 columns.
HEADS = re.compile("(ForCausalLM|LMHeadModel)$")


def models() -> None:
    """List the presets: model shapes that the commands know by name."""
    table = Table(Column("name", no_wrap=True), Column("family", no_wrap=True))
    for column in PresetSize._fields[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    for name, size in PRESET_SIZES.items():
        counts = (f"{count:,}" for count in size[1:-1])
        table.add_row(name, HEADS.sub("", size.architecture), *counts, _brief(size.parameters))
    out.print(table)


def _brief(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
