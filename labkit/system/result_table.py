"""What is shown of a result, wherever it is shown: as a table of text in a terminal and in a notebook, and as rows of
figures in a frame and in a CSV file.
"""

from __future__ import annotations

import html
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from labkit.system.csv_text import csv_text
from labkit.system.markdown import as_text, markdown_table
from labkit.system.shown import shown_lines
from labkit.system.whole_file import write_whole

if TYPE_CHECKING:
    import pandas as pd

PLAIN_TEXT = "tex2jax_ignore mathjax_ignore"  # classes of what is no formula, whatever dollar signs are in it
PLAIN_WIDTH = 100  # columns of the text that `str` gives


@dataclass(frozen=True)
class Claim:
    """A line below a table: its first words, which are set off in a style of rich's, and the rest."""

    words: str
    style: str
    rest: str


@dataclass(frozen=True)
class ResultTable:
    """Rows of text under their columns, of which the first `names` tell the rows apart; then what may be claimed of
    them, and in a small voice where they come from. Nothing in any text is markup. `styles`: of cells with such a text,
    in a terminal.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    claim: Claim | None = None
    notes: tuple[str, ...] = ()
    names: int = 1
    styles: Mapping[str, str] = field(default_factory=dict)

    def __rich__(self) -> RenderableType:
        title = Text(self.title, style="table.title") if self.title else None
        table = Table(title=title, title_justify="left")
        for place, column in enumerate(self.columns):
            table.add_column(Text(shown_lines(column)), justify="left" if place < self.names else "right")
        for row in self.rows:
            table.add_row(*(Text(shown_lines(cell), style=self.styles.get(cell, "")) for cell in row))
        claim = [Text.assemble((self.claim.words, self.claim.style), f"  {self.claim.rest}")] if self.claim else []
        return Group(table, *claim, *(Text(note, style="dim") for note in self.notes))

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=PLAIN_WIDTH, color_system=None, legacy_windows=False)
        with console.capture() as captured:
            console.print(self)
        return shown_lines("\n".join(line.rstrip() for line in captured.get().split("\n")).rstrip("\n"))

    def html(self) -> str:
        """A table without a colour of its own, so that it has those of the page around it, light or dark."""
        title = f"<p><strong>{_html(self.title)}</strong></p>" if self.title else ""
        claim = f"<p><strong>{_html(self.claim.words)}</strong> {_html(self.claim.rest)}</p>" if self.claim else ""
        notes = "<br>".join(map(_html, self.notes))
        body = "".join(self._html_row("td", row) for row in self.rows)
        table = f"<table><thead>{self._html_row('th', self.columns)}</thead><tbody>{body}</tbody></table>"
        below = f"<p><small>{notes}</small></p>" if notes else ""
        return f'<div class="{PLAIN_TEXT}">{title}{table}{claim}{below}</div>'

    def markdown(self) -> str:
        """The title as a heading of the second level, the table, the claim and the notes."""
        claim = f"**{as_text(self.claim.words)}** {as_text(self.claim.rest)}" if self.claim else ""
        title = f"## {as_text(self.title)}" if self.title else ""
        cells = [[as_text(cell) for cell in row] for row in (self.columns, *self.rows)]
        notes = "\n".join(f"- {as_text(note)}" for note in self.notes)
        parts = (title, markdown_table(cells[0], cells[1:]), claim, notes)
        return "\n\n".join(part for part in parts if part) + "\n"

    def _html_row(self, tag: str, cells: tuple[str, ...]) -> str:
        sides = ("left" if place < self.names else "right" for place in range(len(cells)))
        inner = "".join(
            f'<{tag} style="text-align: {side}">{_html(cell)}</{tag}>' for side, cell in zip(sides, cells, strict=True)
        )
        return f"<tr>{inner}</tr>"


class Tabular(ABC):
    """A result that shows itself as a table, in a terminal with rich, in a notebook and as text, and that gives what it
    holds as a frame.
    """

    @abstractmethod
    def table(self) -> ResultTable:
        """What is shown of it."""

    @abstractmethod
    def to_frame(self) -> pd.DataFrame:
        """What it holds, one figure or one sample a row."""

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write `to_frame` as a CSV file, whole or not at all; returns its path.

        Text that a spreadsheet would take for a formula gets an apostrophe before it.
        """
        write_whole(Path(path), csv_text(self.to_frame()))
        return Path(path)

    def __rich__(self) -> RenderableType:
        return self.table()

    def __repr__(self) -> str:
        """In a line: what holds figures may hold thousands of samples."""
        table = self.table()
        claim = f": {table.claim.words} {table.claim.rest.partition(chr(10))[0]}" if table.claim else ""
        return f"<{type(self).__name__} {table.title}{claim}>"

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows in a terminal, and where a notebook shows text alone."""
        printer.text(str(self.table()))


def _html(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")
