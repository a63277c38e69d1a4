"""`labkit trace`: tables of any trace, annotated or not. A thin layer over `labkit.nsys.tables`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.cli.forms import Form, check_no_capture
from labkit.cli.words import Command
from labkit.nsys.tables.catalogue import (
    BY_UNIT,
    COMMANDS,
    COMPARED,
    OF_KERNELS,
    OF_RANGES,
    UNIT_TIMES,
    TraceCommand,
    TraceTable,
)
from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean
from labkit.system.output_folder import RUNS
from labkit.system.whole_file import check_output_file

if TYPE_CHECKING:
    import pandas as pd

    from labkit.nsys.tables.compare import TraceDifference

trace = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Show tables of any trace of nsys (.sqlite, .nsys-rep) or torch.profiler (.json, .json.gz).",
)

Files = Annotated[list[Path], typer.Argument(help="One trace, or the traces of all ranks.")]
Window = Annotated[str | None, typer.Option(help="FROM:TO in ms from the capture's start; either may be left out.")]
Name = Annotated[str | None, typer.Option("--name", help="Only names that match this regular expression anywhere.")]
Rank = Annotated[list[int] | None, typer.Option(help="Only this rank; may be repeated.")]
Device = Annotated[list[int] | None, typer.Option(help="Only this device; may be repeated.")]
Stream = Annotated[list[int] | None, typer.Option(help="Only this stream; may be repeated.")]
Range = Annotated[str | None, typer.Option("--range", help="Only work inside ranges whose name matches this.")]
Top = Annotated[int | None, typer.Option(min=0, help="Rows of a table; 0: all. Default: 20; for programs all.")]
Sort = Annotated[str | None, typer.Option(help="COLUMN or TABLE.COLUMN to sort by, the largest first.")]
Ascending = Annotated[bool, typer.Option("--ascending", help="Sort the smallest first.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object, with all columns.")]
Csv = Annotated[bool, typer.Option("--csv", help="CSV, with all columns.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Markdown.")]
Parquet = Annotated[bool, typer.Option("--parquet", help="Parquet, with all columns; needs --output.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="A file instead of the terminal.")]

NEAR = 0.7  # likeness of a column to a mistyped one
TOP_OF_SEVERAL = 8  # rows of each table of a command that shows several


def window_of(text: str | None) -> tuple[int, int] | None:
    """The window in nanoseconds from `FROM:TO` in ms. An end that is left out is open."""
    from labkit.nsys.tables.selection import OPEN_NS

    if text is None:
        return None
    first, colon, last = text.partition(":")
    try:
        opens = round(float(first) * 1e6) if first else -OPEN_NS
        closes = round(float(last) * 1e6) if last else OPEN_NS
    except (ValueError, OverflowError):
        colon = ""
    if not colon:
        raise UserError(f"got the window {text!r}, expected FROM:TO in ms from the capture's start, such as 1.5:20")
    return opens, closes


def _add(shown: TraceCommand) -> None:
    """Adds a command of the catalogue. All of them take the same options."""

    @trace.command(shown.name, help=shown.help, rich_help_panel=shown.panel or None, cls=Command)
    def command(
        files: Files,
        window: Window = None,
        pattern: Name = None,
        rank: Rank = None,
        device: Device = None,
        stream: Stream = None,
        range_: Range = None,
        top: Top = None,
        sort: Sort = None,
        ascending: Ascending = False,
        as_json: Json = False,
        csv: Csv = False,
        markdown: Markdown = False,
        parquet: Parquet = False,
        output: Output = None,
    ) -> None:
        form = Form.of(json=as_json, csv=csv, markdown=markdown, parquet=parquet, output=output, inputs=files)
        columns = sort_columns(sort, shown.tables)
        from labkit.cli.showing import show
        from labkit.nsys.reader.reading import read
        from labkit.nsys.tables.selection import Selection
        from labkit.nsys.tables.summary import summary_of
        from labkit.nsys.tables.trace_tables import trace_tables

        ranks, devices, streams = (tuple(numbers or ()) for numbers in (rank, device, stream))
        selection = Selection(window_of(window), pattern, ranks, devices, streams, range_)
        summary = shown.name == "summary"  # labkit's cache keeps summaries, and no other tables
        made = summary_of(files, selection) if summary else trace_tables(read(files), shown.name, selection)
        if len(shown.tables) > 1 and top is None and form in (Form.TERMINAL, Form.MARKDOWN):
            top = TOP_OF_SEVERAL
        about = {
            "ranks_known": made.ranks_known,
            "files": made.source.files,
            "remarks": made.remarks,
            "skipped": made.source.skipped,
            "unread": made.source.unread,
        }
        frames = _sorted(made.frames, columns, ascending)
        show({table: frames[table.name] for table in shown.tables}, form, output=output, top=top, about=about)


@trace.command(cls=Command)
def compare(
    a: Annotated[Path, typer.Argument(help="The trace of the baseline.")],
    b: Annotated[Path, typer.Argument(help="The trace of the candidate.")],
    window: Window = None,
    pattern: Name = None,
    rank: Rank = None,
    range_: Range = None,
    top: Top = None,
    sort: Sort = None,
    ascending: Ascending = False,
    as_json: Json = False,
    csv: Csv = False,
    markdown: Markdown = False,
    parquet: Parquet = False,
    output: Output = None,
) -> None:
    """Compare any two traces by ranges and kernels: which take more or less time.

    The parts add up to the difference.
    """
    form = Form.of(json=as_json, csv=csv, markdown=markdown, parquet=parquet, output=output, inputs=(a, b))
    columns = sort_columns(sort, COMPARED)
    from labkit.cli.showing import out, show
    from labkit.nsys.reader.reading import read
    from labkit.nsys.tables.compare import compare_traces
    from labkit.nsys.tables.selection import Selection

    selection = Selection(window_of(window), pattern, tuple(rank or ()), range=range_)
    first, second = read(a), read(b)
    difference = compare_traces(first, second, selection)
    if difference.units is None and (absent := [name for name in columns.values() if name in UNIT_TIMES]):
        raise UserError(f"got --sort {sort}, but the traces repeat no common unit of work, so there is no {absent[0]}")
    frames = {OF_RANGES.name: difference.ranges, OF_KERNELS.name: difference.kernels}
    sources = ((a.name, first.source), (b.name, second.source))
    about: dict[str, Any] = {"files": [str(a), str(b)], "a_ns": difference.a_ns, "b_ns": difference.b_ns}
    units = asdict(difference.units) if difference.units else None
    about |= {"remarks": difference.remarks, "units": units, "ratio": difference.ratio}
    for kind in ("skipped", "unread"):
        about[kind] = [f"{file}: {line}" for file, source in sources for line in getattr(source, kind)]
    if form is Form.TERMINAL:
        out.print("\n".join(_sides(a.name, b.name, difference)), soft_wrap=True)
    by_unit = difference.units is not None and difference.units.differ
    if by_unit:
        frames = {
            table: frame.sort_values("unit_difference_ns", key=abs, ascending=False, ignore_index=True)
            for table, frame in frames.items()
        }
    frames = _sorted(frames, columns, ascending)
    tables = [replace(table, shown=BY_UNIT) if by_unit else table for table in COMPARED]
    show({table: frames[table.name] for table in tables}, form, output=output, top=top, about=about)


def _sides(a: str, b: str, difference: TraceDifference) -> Iterator[str]:
    """One line for each side, with the time per unit if the sides have different numbers of units."""
    units = difference.units if difference.units and difference.units.differ else None
    a_count, b_count = (units.a, units.b) if units else (1, 1)
    sides = ((a, difference.a_ns, a_count), (b, difference.b_ns, b_count))
    ratio = (f", {difference.ratio:.3f} of A" + (" for one of them" if units else ""),)
    for letter, (name, time, count), end in zip("AB", sides, ("", *ratio), strict=True):
        per_unit = f", {count:,.4g} of {units.name!r}, each {time / count / 1e6:,.3f} ms" if units else ""
        yield f"{letter} {name}: {time / 1e6:,.3f} ms{per_unit}{end}"


@trace.command(cls=Command)
def replay(
    files: Files,
    op: Annotated[str, typer.Option(help="The operator of PyTorch, such as aten::mm.")],
    nth: Annotated[int, typer.Option(help="Take the recorded inputs with the n-th most time.")] = 1,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: runs/replay_OP.py.")] = None,
) -> None:
    """Write a script that runs one recorded operator again, with the same shapes, types and strides."""
    from labkit.cli.showing import out
    from labkit.nsys.reader.reading import read
    from labkit.nsys.tables.replay import write_replay

    name = re.sub(r"[^\w.]+", "_", op.rpartition("::")[2])
    target = output or Path(RUNS, f"replay_{name}.py")
    check_no_capture(target, files)
    check_output_file(target)
    out.print(str(write_replay(read(files), op, target, nth=nth)), soft_wrap=True)


@trace.command(cls=Command)
def merge(
    files: Files,
    output: Annotated[Path, typer.Option("--output", "-o", help="Ends in .json or .json.gz.")] = Path("merged.json.gz"),
) -> None:
    """Merge the traces of all ranks into one for Perfetto, with clocks aligned by their collectives."""
    from labkit.cli.showing import err, out
    from labkit.nsys.reader.reading import read
    from labkit.nsys.tables.rank_waits import on_one_clock
    from labkit.nsys.timeline.export import write_chrome

    if not output.name.endswith((".json", ".json.gz")):
        raise UserError(f"got --output {output}, expected a name that ends in .json or .json.gz")
    check_no_capture(output, files)
    check_output_file(output)
    merged = on_one_clock(read(files))
    for line in merged.source.skipped:
        err.print(f"note: {line}", style="yellow", soft_wrap=True)
    out.print(str(write_chrome(merged, output)), soft_wrap=True)


def sort_columns(text: str | None, tables: Sequence[TraceTable]) -> dict[str, str]:
    """The column to sort by of each table that has it. `text` is a COLUMN of any table, or TABLE.COLUMN of one.

    A column may be named without its unit, and upper case, spaces, hyphens and underscores do not matter. UserError for
    a column that no table has.
    """
    if text is None:
        return {}
    table_name, dot, column = text.rpartition(".")
    columns = {
        table.name: name
        for table in tables
        if not dot or _plain(table.name) == _plain(table_name)
        if (name := _names(table).get(_plain(column)))
    }
    if not columns:
        listed = "\n".join(f"  {table.name}: {', '.join(table.columns)}" for table in tables)
        prefixes = [f"{table.name}." for table in tables if dot or len(tables) > 1] + [""] * (not dot)
        known = {column.removesuffix("_ns"): None for table in tables for column in table.columns}
        near = did_you_mean(text, [prefix + name for prefix in prefixes for name in known], likeness=NEAR)
        raise UserError(f"got --sort {text}{near}, expected a column; the tables and their columns are:\n{listed}")
    return columns


def _names(table: TraceTable) -> dict[str, str]:
    """The columns of a table by all their names. The name of a column goes before another column's without its unit."""
    short = {_plain(re.sub(r"(_ns| \(ns\)| \(%\))$", "", column)): column for column in table.columns}
    return short | {_plain(column): column for column in table.columns}


def _plain(name: str) -> str:
    """A name without upper case, spaces and underscores."""
    return re.sub("[ _-]", "-", name.casefold())


def _sorted(frames: Mapping[str, pd.DataFrame], columns: Mapping[str, str], ascending: bool) -> dict[str, pd.DataFrame]:
    """The frames, those in `columns` sorted by their columns. Without columns, `ascending` reverses all of them."""
    if not columns:
        return {name: frame.iloc[::-1].reset_index(drop=True) if ascending else frame for name, frame in frames.items()}
    return {
        name: frame.sort_values(columns[name], ascending=ascending, kind="stable", ignore_index=True, key=_order)
        if name in columns
        else frame
        for name, frame in frames.items()
    }


def _order(values: pd.Series) -> pd.Series:
    """The values to compare: numbers as they are, and texts with the numbers in them in the order of numbers."""
    if values.dtype.kind in "biuf":
        return values
    return values.astype("str").str.replace(r"\d+", lambda digits: digits[0].zfill(20), regex=True)


for _command in COMMANDS.values():
    _add(_command)
