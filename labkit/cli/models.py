"""`labkit models`: a thin layer over `labkit.models.presets`."""

from __future__ import annotations

from rich.table import Column, Table

from labkit.models.preset_sizes import PRESET_SIZES, PresetSize
from labkit.system.terminal import terminal

out = terminal()


def models() -> None:
    """List the presets: the shapes that `compare` and `generate` know by name."""
    table = Table(Column("name", no_wrap=True), Column("architecture", overflow="ellipsis"))
    for column in PresetSize._fields[1:]:
        table.add_column(column, justify="right")
    for name, size in PRESET_SIZES.items():
        counts = (f"{count:,}" for count in size[1:-1])
        table.add_row(name, size.architecture, *counts, f"{size.parameters / 1e6:,.1f} M")
    out.print(table)
