"""Shows tables in the terminal, or writes them to a file or a pipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import typer

from labkit.cli.forms import Form
from labkit.cli.frames import markdown, rows, terminal_table
from labkit.nsys.tables.catalogue import TraceTable
from labkit.nsys.tables.kernel_names import brief
from labkit.nsys.tables.trace_tables import catalogued
from labkit.system.markdown import as_text
from labkit.system.result_table import csv_text
from labkit.system.shown import shown_lines
from labkit.system.terminal import terminal
from labkit.system.whole_file import whole_file, write_whole

out = terminal(markup=False, highlight=False)
err = terminal(stderr=True, markup=False, highlight=False)

TOP = 20
MOST_UNREAD = 8
MOST_SKIPPED = 12


def show(
    tables: Mapping[TraceTable, pd.DataFrame],
    form: Form,
    *,
    output: Path | None,
    top: int | None,
    about: Mapping[str, Any],
) -> None:
    """Shows tables, each with at most `top` rows (None: TOP for people, all for programs; 0: all).

    `about`: facts that programs get with the tables; people see its "remarks", "skipped" and "unread" on stderr.
    """
    limit = (TOP if form in (Form.TERMINAL, Form.MARKDOWN) else 0) if top is None else top
    rows_of = {table: frame.head(limit) if limit else frame for table, frame in tables.items()}
    ranks_known = bool(about.get("ranks_known", True))
    if form is Form.TERMINAL:
        for table, frame in tables.items():
            if len(frame):
                out.print()
                _print(table, frame, rows_of[table], ranks_known)
            elif len(tables) == 1:
                out.print(f"{table.title}: none")
        _say(about)
    elif form is Form.PARQUET and output is not None:
        _write_parquet(rows_of, output)
        _say(about)
    else:
        text = _markdown(tables, rows_of, ranks_known) if form is Form.MARKDOWN else _for_programs(rows_of, form, about)
        if output is None:
            typer.echo(shown_lines(text) if out.is_terminal else text)  # programs get names unchanged
        else:
            write_whole(output, text + "\n")
            out.print(str(output), soft_wrap=True)
        if form is not Form.JSON:
            _say(about)


def _print(table: TraceTable, frame: pd.DataFrame, rows: pd.DataFrame, ranks_known: bool) -> None:
    if table.sentence:
        out.print(table.title, style="bold")
        out.print("\n".join(_sentences(table, rows)))
    else:
        out.print(terminal_table(*_for_people(table, frame, rows, ranks_known), out.width, table.title))
    if len(rows) < len(frame):
        err.print(f"{len(rows)} of {len(frame):,} rows; --top 0 shows all", style="dim")


def _for_programs(rows_of: Mapping[TraceTable, pd.DataFrame], form: Form, about: Mapping[str, Any]) -> str:
    """JSON, or CSV with the tables' names above them if there are several."""
    if form is Form.JSON:
        return json.dumps({**about, **{table.name: rows(frame) for table, frame in rows_of.items()}})
    names = [f"{table.name}\n" if len(rows_of) > 1 else "" for table in rows_of]
    texts = [name + csv_text(frame) for name, frame in zip(names, rows_of.values(), strict=True)]
    return "\n".join(texts).rstrip("\n")


def _markdown(
    tables: Mapping[TraceTable, pd.DataFrame], rows_of: Mapping[TraceTable, pd.DataFrame], ranks_known: bool
) -> str:
    texts = []
    for table, frame in tables.items():
        if len(frame) and table.sentence:
            text = "\n".join(map(as_text, _sentences(table, rows_of[table])))
        elif len(frame):
            text = markdown(*_for_people(table, frame, rows_of[table], ranks_known))
        else:
            continue
        texts.append(f"### {table.title}\n\n{text}")
    return "\n\n".join(texts)


def _sentences(table: TraceTable, rows: pd.DataFrame) -> list[str]:
    sentence = catalogued(table.sentence)
    return [f"{number}. {sentence(row)}" for number, row in enumerate(rows.to_dict("records"), 1)]


def _for_people(
    table: TraceTable, frame: pd.DataFrame, rows: pd.DataFrame, ranks_known: bool
) -> tuple[pd.DataFrame, list[str]]:
    """The rows with short names of kernels, and the columns with information.

    Left out are empty columns, and a rank or device that is the same in the whole frame. A rank that is not known is
    called a process.
    """
    places = () if table.of_ranks else ("rank", "device")
    columns = [
        name
        for name in table.shown
        if frame[name].notna().any() and not (name in places and frame[name].nunique() == 1)
    ]
    brief_names = rows.assign(**{name: rows[name].astype("str").map(brief) for name in table.kernels})[columns]
    if ranks_known:
        return brief_names, columns
    named = brief_names.rename(columns={"rank": "process"})
    return named, list(named.columns)


def _write_parquet(rows_of: Mapping[TraceTable, pd.DataFrame], output: Path) -> None:
    """Writes one file, or for several tables a folder with a file for each."""
    for table, frame in rows_of.items():
        path = output if len(rows_of) == 1 else output / f"{table.name}.parquet"
        with whole_file(path) as unfinished:
            frame.to_parquet(unfinished, index=False)
        out.print(str(path), soft_wrap=True)


def _say(about: Mapping[str, Any]) -> None:
    for remark in about.get("remarks", ()):
        err.print(f"note: {remark}", style="yellow", soft_wrap=True)
    skipped = about["skipped"]
    for line in skipped[:MOST_SKIPPED]:
        err.print(f"skipped: {line}", style="dim", soft_wrap=True)
    if len(skipped) > MOST_SKIPPED:
        err.print(f"skipped: {len(skipped) - MOST_SKIPPED} more; --json lists all", style="dim")
    if unread := about["unread"]:
        more = f" and {len(unread) - MOST_UNREAD} more kinds" if len(unread) > MOST_UNREAD else ""
        err.print(f"not read: {', '.join(unread[:MOST_UNREAD])}{more}", style="dim", soft_wrap=True)
