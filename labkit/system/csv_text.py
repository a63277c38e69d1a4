"""Frames as CSV that a spreadsheet may open."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet computes a text that begins with one of these


def csv_text(frame: pd.DataFrame) -> str:
    """The whole frame as CSV. A text that a spreadsheet would compute gets an apostrophe in front."""
    safe = frame.copy()
    for name in safe.columns:
        if safe[name].dtype.kind not in "biufM":
            safe[name] = [_quoted(cell) for cell in safe[name]]
    return safe.to_csv(index=False, lineterminator="\n")


def _quoted(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell
