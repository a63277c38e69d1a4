"""`labkit trace`: tables of any trace, annotated or not. A thin layer over `labkit.nsys.tables`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.cli.forms import Form, Shown
from labkit.cli.words import Command
from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean
from labkit.system.output_folder import RUNS
from labkit.system.whole_file import check_no_input, check_output_file

if TYPE_CHECKING:
    import pandas as pd

    from labkit.nsys.tables.compare import TraceDifference
    from labkit.nsys.tables.selection import Selection
    from labkit.nsys.trace import Source

    Tables = dict[str, pd.DataFrame]
    Built = tuple[Source, Tables, tuple[str, ...], bool]  # source, tables, remarks, whether the ranks are known
    Build = Callable[[list[Path], Selection], Built]

trace = typer.Typer(
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
Sort = Annotated[str | None, typer.Option(help="The column to sort by, the largest first.")]
Ascending = Annotated[bool, typer.Option("--ascending", help="Sort the smallest first.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object, with all columns.")]
Csv = Annotated[bool, typer.Option("--csv", help="CSV, with all columns.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Markdown.")]
Parquet = Annotated[bool, typer.Option("--parquet", help="Parquet, with all columns; needs --output.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="A file instead of the terminal.")]

BY_UNIT = ("name", "a_count", "b_count", "a_unit_ns", "b_unit_ns", "unit_difference_ns", "unit_change")
DIFFERENCE = ("name", "a_count", "b_count", "a_ns", "b_ns", "difference_ns", "change")
NEAR = 0.7  # likeness of a column to a mistyped one
OF_SUMMARY = 8  # rows of each table of the summary
TIMES = ("count", "total_ns", "share", "median_ns", "p95_ns")
BUDGET = ("busy", "compute", "exposed_communication", "exposed_copy", "idle")
SHOWN = {
    "contents": Shown(("rank", "what", "count", "start_ns", "end_ns"), "Contents"),
    "budget": Shown(("rank", "device", "span_ns", *(f"{part}_share" for part in BUDGET)), "Where the GPU's time goes"),
    "idle": Shown(("rank", "device", "cause", "gaps", "time_ns", "share"), "What the idle GPU waited for"),
    "kernels": Shown(("name", *TIMES), "Kernels", ("name",)),
    "copies": Shown(("name", "memory", "size", "count", "bytes", "total_ns", "gb_s"), "Copies and memsets"),
    "calls": Shown(("library", "name", *TIMES), "Calls on the CPU"),
    "ranges": Shown(("name", "count", "total_ns", "median_ns", "operations", "busy_share"), "Ranges"),
    "gaps": Shown(("rank", "start_ns", "time_ns", "cause", "awaited", "next"), "Gaps", ("next",)),
    "categories": Shown(("category", "count", "total_ns", "share"), "Operators of PyTorch by what they do"),
    "operators": Shown(
        ("name", "shapes", "count", "total_ns", "share", "tflop_s", "tb_s", "roofline_share"), "Operators by shapes"
    ),
    "losses": Shown(("loss",), "Biggest first: what could be gained at most", sentences="labkit.nsys.tables.losses"),
    "short": Shown(("name", "count", "median_ns", "total_ns", "idle_ns", "share"), "Short kernels", ("name",)),
    "of ranges": Shown(DIFFERENCE, "The difference by ranges"),
    "of kernels": Shown(DIFFERENCE, "The difference by kernels"),
    "stragglers": Shown(("rank", "range", "times", "late_ns", "median_ns"), "Who came late, and where", of_ranks=True),
    "ranks": Shown(("rank", "collectives", "last", "wait_ns", "exchange_ns", "offset_ns", "residual_ns"), "Ranks"),
    "collectives": Shown(
        ("start_ns", "kind", "bytes", "skew_ns", "transfer_ns", "bus_gb_s", "last", "range"), "Collectives"
    ),
    "projection": Shown(("rank", "name", "start_ns", "duration_ns", "operations", "level"), "Ranges on the GPU"),
}
SUMS = ("Time (%)", "Total Time (ns)", "Med (ns)")
OF_NSYS = {
    "nvtx_gpu_proj_trace": Shown(
        ("Name", "Projected Start (ns)", "Projected Duration (ns)", "NumGPUOps", "Lvl"), "Ranges on the GPU"
    ),
    "nvtx_gpu_proj_sum": Shown(
        ("Range", "Total Proj Time (ns)", "Range Instances", "Proj Med (ns)", "Total GPU Ops"), "Ranges by name"
    ),
    "nvtx_kern_sum": Shown(
        ("NVTX Range", "Kern Inst", "Total Time (ns)", "Med (ns)", "Kernel Name"), "Kernels of ranges", ("Kernel Name",)
    ),
    "cuda_gpu_kern_sum": Shown((*SUMS, "Instances", "Name"), "Kernels by name", ("Name",)),
    "cuda_gpu_mem_time_sum": Shown((*SUMS, "Count", "Operation"), "Copies and memsets by kind"),
    "cuda_api_sum": Shown((*SUMS, "Num Calls", "Name"), "Calls of CUDA by name"),
    "osrt_sum": Shown((*SUMS, "Num Calls", "Name"), "Calls of the system's libraries by name"),
}


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


def _add(name: str, build: Build, help_: str, panel: str | None = None) -> None:
    """Adds a command. All commands take the same options."""

    @trace.command(name, help=help_, rich_help_panel=panel, cls=Command)
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
        from labkit.cli.showing import show
        from labkit.nsys.tables.selection import Selection

        form = Form.of(json=as_json, csv=csv, markdown=markdown, parquet=parquet, output=output, inputs=files)
        ranks, devices, streams = (tuple(numbers or ()) for numbers in (rank, device, stream))
        selection = Selection(window_of(window), pattern, ranks, devices, streams, range_)
        source, tables, remarks, ranks_known = build(files, selection)
        if len(tables) > 1 and top is None and form in (Form.TERMINAL, Form.MARKDOWN):
            top = OF_SUMMARY
        tables = _sorted(tables, sort, ascending)
        about = {
            "ranks_known": ranks_known,
            "files": source.files,
            "remarks": remarks,
            "skipped": source.skipped,
            "unread": source.unread,
        }
        titled = {table: ((SHOWN | OF_NSYS)[table], frame) for table, frame in tables.items()}
        show(titled, form, output=output, top=top, about=about)


@trace.command()
def compare(
    a: Annotated[Path, typer.Argument(help="The trace of the baseline.")],
    b: Annotated[Path, typer.Argument(help="The trace of the candidate.")],
    window: Window = None,
    pattern: Name = None,
    rank: Rank = None,
    range_: Range = None,
    top: Top = None,
    as_json: Json = False,
    csv: Csv = False,
    markdown: Markdown = False,
    parquet: Parquet = False,
    output: Output = None,
) -> None:
    """Compare any two traces by ranges and kernels: which take more or less time.

    The parts add up to the difference.
    """
    from labkit.cli.showing import out, show
    from labkit.nsys.reader.reading import read
    from labkit.nsys.tables.compare import compare_traces
    from labkit.nsys.tables.selection import Selection

    form = Form.of(json=as_json, csv=csv, markdown=markdown, parquet=parquet, output=output, inputs=(a, b))
    selection = Selection(window_of(window), pattern, tuple(rank or ()), range=range_)
    first, second = read(a), read(b)
    difference = compare_traces(first, second, selection)
    tables = {"of ranges": difference.ranges, "of kernels": difference.kernels}
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
        tables = {
            table: frame.sort_values("unit_difference_ns", key=abs, ascending=False, ignore_index=True)
            for table, frame in tables.items()
        }
    titled = {
        table: (replace(SHOWN[table], columns=BY_UNIT) if by_unit else SHOWN[table], frame)
        for table, frame in tables.items()
    }
    show(titled, form, output=output, top=top, about=about)


def _sides(a: str, b: str, difference: TraceDifference) -> Iterator[str]:
    """One line for each side, with the time per unit if the sides have different numbers of units."""
    units = difference.units if difference.units and difference.units.differ else None
    a_count, b_count = (units.a, units.b) if units else (1, 1)
    sides = ((a, difference.a_ns, a_count), (b, difference.b_ns, b_count))
    ratio = (f", {difference.ratio:.3f} of A" + (" for one of them" if units else ""),)
    for letter, (name, time, count), end in zip("AB", sides, ("", *ratio), strict=True):
        per_unit = f", {count:,.4g} of {units.name!r}, each {time / count / 1e6:,.3f} ms" if units else ""
        yield f"{letter} {name}: {time / 1e6:,.3f} ms{per_unit}{end}"


@trace.command()
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
    check_no_input(target, files)
    check_output_file(target)
    out.print(str(write_replay(read(files), op, target, nth=nth)), soft_wrap=True)


@trace.command()
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
    check_no_input(output, files)
    check_output_file(output)
    merged = on_one_clock(read(files))
    for line in merged.source.skipped:
        err.print(f"note: {line}", style="yellow", soft_wrap=True)
    out.print(str(write_chrome(merged, output)), soft_wrap=True)


def _sorted(tables: Tables, by: str | None, ascending: bool) -> Tables:
    """The tables sorted by a column, named with or without its unit. Tables without the column stay unchanged."""
    if by is None:
        return {name: frame.iloc[::-1].reset_index(drop=True) if ascending else frame for name, frame in tables.items()}
    known = {column.removesuffix("_ns"): column for frame in tables.values() for column in frame}
    known |= {column: column for frame in tables.values() for column in frame}
    if by not in known:
        columns = "\n".join(f"  {name}: {', '.join(frame)}" for name, frame in tables.items())
        near = did_you_mean(by, known, likeness=NEAR)
        raise UserError(f"got --sort {by}{near}, expected a column; the tables and their columns are:\n{columns}")
    return {
        name: frame.sort_values(known[by], ascending=ascending, kind="stable", ignore_index=True)
        if known[by] in frame
        else frame
        for name, frame in tables.items()
    }


def _summary(files: list[Path], selection: Selection) -> Built:
    from labkit.nsys.tables.kept_summary import summary_of

    summary = summary_of(files, selection)
    return summary.source, summary.frames, summary.remarks, summary.ranks_known


def _collectives(files: list[Path], selection: Selection) -> Built:
    from labkit.nsys.analysis.rank_numbers import ranks_are_known
    from labkit.nsys.reader.reading import read
    from labkit.nsys.tables.rank_waits import rank_waits

    opened = read(files)
    waits = rank_waits(opened, selection)
    return (
        opened.source,
        {"ranks": waits.ranks, "stragglers": waits.stragglers, "collectives": waits.frame},
        waits.remarks,
        ranks_are_known(opened),
    )


def _operators(files: list[Path], selection: Selection) -> Built:
    from labkit.nsys.analysis.rank_numbers import ranks_are_known
    from labkit.nsys.reader.reading import read
    from labkit.nsys.tables.operators import categories, operators

    opened = read(files)
    frame = operators(opened, selection)
    known = frame["roofline_share"].notna().any()
    remark = "the roofline of this GPU is not known, or no shapes were recorded (record_shapes=True)"
    tables = {"categories": categories(frame), "operators": frame}
    return opened.source, tables, () if known else (remark,), ranks_are_known(opened)


def _single(name: str, module: str, function: str) -> Build:
    """Builds one table with a function of `labkit.nsys.tables`, which is loaded on first use."""

    def build(files: list[Path], selection: Selection) -> Built:
        from labkit.nsys.analysis.rank_numbers import ranks_are_known
        from labkit.nsys.reader.reading import read
        from labkit.nsys.tables.doubts import doubts

        opened = read(files)
        frame = getattr(import_module(f"labkit.nsys.tables.{module}"), function)(opened, selection)
        return opened.source, {name: frame}, tuple(doubts(opened)), ranks_are_known(opened)

    return build


_add("summary", _summary, "Show what a trace contains and where its time goes.")
_add("collectives", _collectives, "List the collectives of the ranks: last rank, waiting time, bandwidth.")
_add("operators", _operators, "List PyTorch's operators by shapes: time, TFLOP/s, TB/s, share of the roofline.")
for _name, _module, _function, _help in (
    ("kernels", "operations", "kernels", "List kernels by name: number and time."),
    ("ranges", "ranges", "ranges", "List ranges by name: time on the GPU, and how busy it was."),
    ("copies", "operations", "copies", "List copies and memsets by kind, memory and size: number and rate."),
    ("calls", "calls", "calls", "List calls on the CPU: CUDA, operators of PyTorch, the system's libraries."),
    ("gaps", "gaps", "gaps", "List the times when the GPU was idle, and what it waited for."),
    ("short", "gaps", "short_kernels", "List kernels below 10 µs, with the idle time before them."),
    ("projection", "ranges", "projection", "List every range with its time on the GPU."),
):
    _add(_name, _single(_name, _module, _function), _help)
for _name, _shown in OF_NSYS.items():
    _help = f"{_shown.title}, with the columns and rows of nsys."
    _add(_name, _single(_name, "nsys_reports", _name), _help, "Reports of nsys stats, by its names")
