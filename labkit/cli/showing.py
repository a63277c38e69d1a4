"""Shows tables in the terminal, or writes them to a file or a pipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import typer

from labkit.cli.forms import Form, Shown
from labkit.cli.frames import fit, markdown, rows, terminal_table
from labkit.nsys.tables.kernel_names import brief
from labkit.system.csv_text import csv_text
from labkit.system.markdown import as_text
from labkit.system.shown import shown_lines
from labkit.system.terminal import terminal
from labkit.system.whole_file import whole_file, write_whole

out = terminal(markup=False, highlight=False)
err = terminal(stderr=True, markup=False, highlight=False)

TOP = 20
MOST_UNREAD = 8
MOST_SKIPPED = 12


def show(
    tables: Mapping[str, tuple[Shown, pd.DataFrame]],
    form: Form,
    *,
    output: Path | None,
    top: int | None,
    about: Mapping[str, Any],
) -> None:
    """Shows tables by name, each with at most `top` rows (None: TOP for people, all for programs; 0: all).

    `about`: facts that programs get with the tables; people see its "remarks", "skipped" and "unread" on stderr.
    """
    limit = (TOP if form in (Form.TERMINAL, Form.MARKDOWN) else 0) if top is None else top
    kept = {name: frame.head(limit) if limit else frame for name, (_, frame) in tables.items()}
    known = bool(about.get("ranks_known", True))
    people = {name: _brief(frame, tables[name][0]) for name, frame in kept.items()}
    if form is Form.TERMINAL:
        for name, (shown, frame) in tables.items():
            if len(frame) and shown.sentences:
                out.print()
                out.print(shown.title, style="bold")
                out.print("\n".join(shown.lines(kept[name])))
            elif len(frame):
                out.print()
                table = _numbered(people[name], _present(shown, frame), known)
                out.print(terminal_table(*table, fit(out), shown.title))
                _say_cut(len(kept[name]), len(frame))
            elif len(tables) == 1:
                out.print(f"{shown.title}: none")
        _say(about)
    elif form is Form.PARQUET and output is not None:
        _write_parquet(kept, output)
        _say(about)
    else:
        text = _text(tables, people if form is Form.MARKDOWN else kept, form, about)
        if output is None:
            typer.echo(shown_lines(text) if out.is_terminal else text)  # programs get names unchanged
        else:
            write_whole(output, text + "\n")
            out.print(str(output), soft_wrap=True)
        if form is not Form.JSON:
            _say(about)


def _text(
    tables: Mapping[str, tuple[Shown, pd.DataFrame]],
    kept: Mapping[str, pd.DataFrame],
    form: Form,
    about: Mapping[str, Any],
) -> str:
    if form is Form.JSON:
        return json.dumps({**about, **{name: rows(frame) for name, frame in kept.items()}})
    if form is Form.CSV:
        several = len(kept) > 1
        texts = ((f"{name}\n" if several else "") + csv_text(frame) for name, frame in kept.items())
        return "\n".join(texts).rstrip("\n")
    titled = (
        f"### {shown.title}\n\n"
        + (
            "\n".join(map(as_text, shown.lines(kept[name])))
            if shown.sentences
            else markdown(*_numbered(kept[name], _present(shown, frame), bool(about.get("ranks_known", True))))
        )
        for name, (shown, frame) in tables.items()
        if len(frame)
    )
    return "\n\n".join(titled)


def _brief(frame: pd.DataFrame, shown: Shown) -> pd.DataFrame:
    return frame.assign(**{name: frame[name].astype("str").map(brief) for name in shown.kernels})


def _present(shown: Shown, frame: pd.DataFrame) -> list[str]:
    """The columns with information: a rank or device that is the same in all rows, and empty columns, are left out."""
    places = () if shown.of_ranks else ("rank", "device")
    return [
        name
        for name in shown.columns
        if frame[name].notna().any() and not (name in places and frame[name].nunique() == 1)
    ]


def _numbered(frame: pd.DataFrame, columns: list[str], ranks_known: bool) -> tuple[pd.DataFrame, list[str]]:
    """The frame and its columns under the names that people see: "process" instead of "rank" if ranks are not known."""
    if ranks_known or "rank" not in columns:
        return frame, columns
    named = frame[columns].rename(columns={"rank": "process"})
    return named, list(named.columns)


def _write_parquet(kept: Mapping[str, pd.DataFrame], output: Path) -> None:
    """Writes one file, or for several tables a folder with a file for each."""
    files = {output: next(iter(kept.values()))} if len(kept) == 1 else {}
    files |= {output / f"{name}.parquet": frame for name, frame in kept.items()} if not files else {}
    for path, frame in files.items():
        with whole_file(path) as unfinished:
            frame.to_parquet(unfinished, index=False)
        out.print(str(path), soft_wrap=True)


def _say_cut(shown: int, total: int) -> None:
    if shown < total:
        err.print(f"{shown} of {total:,} rows; --top 0 shows all", style="dim")


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
