"""Frames for people and for programs: tables that fit a terminal, Markdown, JSON.

The name of a column ends with its unit, which people see in the title: `total_ns` becomes "total ms" or "total µs".
Programs get the columns unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich.table import Table

from labkit.nsys.tables.catalogue import TITLES, unit_of
from labkit.nsys.tables.kernel_names import cut
from labkit.system.markdown import as_text, markdown_table
from labkit.system.shown import shown

IN_ONE_UNIT = (  # groups of columns that are shown in the same unit of time
    ("avg_ns", "median_ns", "p95_ns", "min_ns", "max_ns"),
    ("a_ns", "b_ns", "difference_ns"),
    ("a_unit_ns", "b_unit_ns", "unit_difference_ns"),
)
NARROWEST = 16  # characters of a column whose texts are cut
TimeUnit = tuple[str, float, int]  # name, nanoseconds, digits to show


def terminal_table(frame: pd.DataFrame, columns: Sequence[str], width: int, title: str = "") -> Table:
    """The columns of a frame as a table of this width, unless the numbers leave too little room for the names."""
    titles, cells = _written(frame, columns)
    texts = [name for name in columns if not _is_numeric(frame[name])]  # they may be cut
    needed = {name: max(_narrowest(titles[name], name in texts), *map(len, cells[name])) for name in columns}
    left = width - 1 - sum(3 + needed[name] for name in columns if name not in texts)
    for place, name in enumerate(sorted(texts, key=needed.__getitem__)):  # short texts leave their room to longer ones
        needed[name] = min(needed[name], max(left // (len(texts) - place) - 3, NARROWEST))
        left -= needed[name] + 3
    table = Table(title=title or None, title_justify="left", title_style="bold")
    for name in columns:
        text = name in texts
        table.add_column(titles[name], justify="left" if text else "right", width=needed[name], no_wrap=text)
    for row in zip(*(cells[name] for name in columns), strict=True):
        table.add_row(
            *(cut(cell, needed[name]) if name in texts else cell for name, cell in zip(columns, row, strict=True))
        )
    return table


def markdown(frame: pd.DataFrame, columns: Sequence[str]) -> str:
    """The columns of a frame as a table in Markdown."""
    titles, cells = _written(frame, columns)
    lines = (map(as_text, row) for row in zip(*(cells[name] for name in columns), strict=True))
    numeric = [place for place, name in enumerate(columns) if _is_numeric(frame[name])]
    return markdown_table([as_text(titles[name]) for name in columns], map(list, lines), numeric)


def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of the whole frame as JSON objects; a missing value is null."""
    return json.loads(frame.to_json(orient="records"))


def _written(frame: pd.DataFrame, columns: Sequence[str]) -> tuple[Mapping[str, str], Mapping[str, list[str]]]:
    titles, cells = {}, {}
    units = {
        name: _time_unit(frame[[member for member in group if member in columns]].to_numpy(float, na_value=0.0))
        for group in IN_ONE_UNIT
        for name in group
    }
    for name in columns:
        titles[name], cells[name] = _column(name, frame[name], units.get(name))
    return titles, cells


def _column(name: str, values: pd.Series, unit_of_group: TimeUnit | None) -> tuple[str, list[str]]:
    """A column's title with its unit, and its cells; the cell of a missing value is ""."""
    title, unit, form = TITLES.get(name, _words(name)), "", None
    if name.endswith("_ns"):
        unit, scale, digits = unit_of_group or _time_unit(values.to_numpy(float, na_value=0.0))
        form = lambda value: f"{value / scale:,.{digits}f}"  # noqa: E731
    elif name in ("change", "unit_change"):
        form = "{:+.1%}".format
    elif unit_of(name) == "share":
        form = "{:.1%}".format
    elif name == "bytes":
        unit, scale = _byte_unit(values)
        form = lambda value: f"{value / scale:,.1f}"  # noqa: E731
    elif name.endswith("(%)"):
        form = "{:.1f}".format
    elif pd.api.types.is_float_dtype(values):
        form = _three_digits
    elif _is_numeric(values):
        form = "{:,}".format
    else:
        form = lambda value: shown(str(value))  # noqa: E731
    return f"{title} {unit}".strip(), ["" if pd.isna(value) else form(value) for value in values.tolist()]


def _three_digits(value: float) -> str:
    """The value with at least three significant digits, and all digits before the point."""
    return f"{value:,.{max(0, 2 - int(np.floor(np.log10(abs(value)))))}f}" if abs(value) >= 1e-3 else f"{value:.3g}"


def _words(name: str) -> str:
    for ending in ("_ns", "_share"):
        name = name.removesuffix(ending)
    return name.replace("_", " ")


def _time_unit(values_ns: NDArray[np.float64]) -> TimeUnit:
    most = float(np.abs(values_ns).max(initial=0.0))
    if most < 1e6:
        return "µs", 1e3, 2
    if most < 1e10:
        return "ms", 1e6, 3 if most < 1e9 else 2
    return "s", 1e9, 3


def _byte_unit(values: pd.Series) -> tuple[str, float]:
    most = float(values.max()) if values.notna().any() else 0.0
    return next(
        (unit, scale)
        for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3), ("B", 1.0))
        if most >= scale or scale == 1.0
    )


def _narrowest(title: str, whole: bool) -> int:
    """The width of a title, or of its longest word if the title may be broken into lines."""
    return max(map(len, [title] if whole else title.split(" ")), default=1)


def _is_numeric(values: pd.Series) -> bool:
    return pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)
