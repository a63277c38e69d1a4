"""How a result is shown: as a table of text in a terminal and in a notebook, and as rows of figures in a frame and in
a CSV file.
"""

from __future__ import annotations

import html
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from labkit.system.home import expanded
from labkit.system.markdown import as_text, markdown_table
from labkit.system.shown import shown_lines
from labkit.system.whole_file import write_whole

if TYPE_CHECKING:
    import pandas as pd

PLAIN_TEXT = "tex2jax_ignore mathjax_ignore"  # CSS classes that keep MathJax from reading dollar signs as formulas
PLAIN_WIDTH = 100  # columns of the text from `str`
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet computes a text that begins with one of these


@dataclass(frozen=True)
class Claim:
    """A line below a table."""

    words: str  # the first words, which are set off
    style: str  # of the first words, a style of rich's
    rest: str


@dataclass(frozen=True)
class ResultTable:
    """A table of text with a claim and notes below it. No text is read as markup."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    claim: Claim | None = None  # what the rows show
    notes: tuple[str, ...] = ()  # where the rows come from, in small print
    names: int = 1  # number of leading columns that identify a row
    styles: Mapping[str, str] = field(default_factory=dict)  # style of a cell in a terminal, by the cell's text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table. Its titles are broken rather than its cells. It has no lines between columns if it would be wider
        than the console with them.
        """
        title = Text(self.title, style="table.title") if self.title else None
        table = Table(title=title, title_justify="left")
        widths = [max(map(cell_len, "\n".join(cells).split("\n"))) for cells in zip(*self.rows, strict=True)]
        if sum(widths) + 3 * len(widths) + 1 > options.max_width:
            table.box, table.padding, table.pad_edge = box.SIMPLE_HEAD, (0, 0), False
        fits = sum(widths) + len(widths) + 1 <= options.max_width
        for place, column in enumerate(self.columns):
            table.add_column(
                Text(shown_lines(column)),
                justify="left" if place < self.names else "right",
                min_width=widths[place] if fits and widths else None,
            )
        for row in self.rows:
            table.add_row(*(Text(shown_lines(cell), style=self.styles.get(cell, "")) for cell in row))
        yield table
        if self.claim:
            yield Text.assemble((self.claim.words, self.claim.style), f"  {self.claim.rest}")
        yield from (Text(note, style="dim") for note in self.notes)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=PLAIN_WIDTH, color_system=None, legacy_windows=False)
        with console.capture() as captured:
            console.print(self)
        return shown_lines("\n".join(line.rstrip() for line in captured.get().split("\n")).rstrip("\n"))

    def html(self) -> str:
        """The table in HTML, without colours of its own, so that it takes the colours of a light or a dark page."""
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


def frame_of(rows: Iterable[Any], columns: Sequence[str] | None = None) -> pd.DataFrame:
    """A frame of rows: mappings by column, or tuples with these columns."""
    import pandas as pd  # imported on use, because it takes half a second

    return pd.DataFrame(list(rows), columns=columns)


class Tabular(ABC):
    """A result that shows itself as a table in a terminal, in a notebook and as text, and converts to a frame."""

    @abstractmethod
    def table(self) -> ResultTable:
        """The table that shows this result."""

    @abstractmethod
    def to_frame(self) -> pd.DataFrame:
        """The result as a frame: one figure or one sample per row."""

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Writes `to_frame` as a CSV file, whole or not at all, and returns its path.

        Text that a spreadsheet would take for a formula gets an apostrophe in front.
        """
        target = expanded(path)
        write_whole(target, csv_text(self.to_frame()))
        return target

    def __rich__(self) -> RenderableType:
        return self.table()

    def __repr__(self) -> str:
        """Title and claim in one line: the result itself may hold thousands of samples."""
        table = self.table()
        claim = f": {table.claim.words} {table.claim.rest.partition(chr(10))[0]}" if table.claim else ""
        return f"<{type(self).__name__} {table.title}{claim}>"

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Shows the table as text, in IPython's terminal and in notebooks that show only text."""
        printer.text(str(self.table()))


def _html(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")


def csv_text(frame: pd.DataFrame) -> str:
    """The whole frame as CSV. A text that a spreadsheet would compute gets an apostrophe in front."""
    safe = frame.copy()
    for name in safe.columns:
        if safe[name].dtype.kind not in "biufM":
            safe[name] = [_quoted(cell) for cell in safe[name]]
    return safe.to_csv(index=False, lineterminator="\n")


def _quoted(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell
