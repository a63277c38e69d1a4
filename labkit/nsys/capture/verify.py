"""Checks whether a run left a usable report, and names the cause if it did not."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from labkit.nsys.capture.command import PROFILER_API, Window
from labkit.nsys.reader.reading import read
from labkit.nsys.trace import EmptyTraceError, TraceError
from labkit.stages import Phase, step_message
from labkit.system.asked_from import given

RANGE_TYPES = "59, 60, 70, 71"  # push/pop and start/end ranges, live and imported
DOMAIN_TYPE = 75
SMALL = 1 << 20  # bytes of a report of torch.profiler; with more it holds events
FULL = 100_000_000  # free bytes; with fewer nsys may find no room for its stream
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
STEP_NAMES = ", ".join(f"'{step_message(phase)}'" for phase in Phase)


@dataclass(frozen=True)
class Contents:
    """The number of rows of each kind in an export."""

    ranges: int = 0
    steps: int = 0  # labkit's ranges around whole steps
    unseen_steps: int = 0  # steps that begin after the last CUDA call of a report that has GPU operations
    domains: int = 0
    operations: int = 0


def contents(export: Path) -> Contents:
    """The contents of an nsys export. Raises TraceError for a damaged export."""
    try:
        with closing(sqlite3.connect(f"{export.resolve().as_uri()}?mode=ro", uri=True)) as database:
            tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            last_call = None  # without a table of calls no step counts as unseen: nothing is later than NULL
            if CALLS in tables:
                last_call = database.execute(f"SELECT max(end) FROM {CALLS}").fetchone()[0] or 0
            ranges, steps, unseen, domains = 0, 0, 0, 0
            if "NVTX_EVENTS" in tables:
                counted = (
                    f"SELECT sum(eventType IN ({RANGE_TYPES})), sum(value IN ({STEP_NAMES})), "
                    f"sum(value IN ({STEP_NAMES}) AND start > ?), sum(eventType = {DOMAIN_TYPE}) "
                    "FROM NVTX_EVENTS LEFT JOIN StringIds ON textId = id"
                )
                counts = database.execute(counted, (last_call,)).fetchone()
                ranges, steps, unseen, domains = (count or 0 for count in counts)
            operations = sum(
                database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
                for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY")
                if table in tables
            )
    except sqlite3.DatabaseError as error:
        raise TraceError(f"the export {export.name} is damaged ({error}); is the disk full?") from None
    return Contents(ranges, steps, unseen if operations else 0, domains, operations)


def contents_of_torch(report: Path) -> Contents:
    """The contents of a report of torch.profiler: one range, or none if the report is empty. TraceError for damage."""
    if report.stat().st_size < SMALL:
        try:
            read(report, cache=False)
        except EmptyTraceError:
            return Contents()
    return Contents(ranges=1)


def forks_unseen(forked: int, profiler: str) -> str:
    """The remark about forked processes, whose work no profiler sees."""
    processes = "1 process was" if forked == 1 else f"{forked} processes were"
    remedy = "start workers with spawn"
    if not profiler.startswith("nsys"):  # torch.profiler does not see spawned processes either
        remedy += f" and profile under nsys ({given('source', 'nsys')}), or do their work in the first process"
    return f"{processes} forked, which no profiler sees: {remedy}"


def lost(reports: list[Contents], announced: int, window: Window) -> str | None:
    """The message about steps that the reports lack, or about steps without their GPU work; None if all arrived.

    announced: the number of steps that the program itself counted. None also for a run that is captured in part, since
    the expected number is then not known.
    """
    if window.name is not None:
        return None
    arrived = sum(report.steps for report in reports)
    if 0 < arrived == sum(report.unseen_steps for report in reports):
        return (
            f"all {arrived} steps began after the last CUDA call in the report: nsys lost track of CUDA, as a version "
            "that is older than the GPU's driver does; capture the range cudaProfilerApi, which the program opens with "
            "torch.cuda.profiler.start()"
        )
    if arrived >= announced:
        return None
    return (
        f"the program announced {announced} steps, but {arrived} arrived in the report: the profiler lost ranges; "
        "repeat the capture with nothing else on the machine (labkit doctor makes a test capture)"
    )


def full(places: Iterable[Path]) -> str:
    """The message about nearly full folders among `places`, to which the profiler writes; empty if none is full."""
    free = {place: shutil.disk_usage(place).free for place in places}
    return "".join(f"; {place} is full ({free[place] / 1e6:.0f} MB free)" for place in free if free[place] < FULL)


def cause(workplace: Path, reports: list[Path], window: Window, profiler: str, forked: int) -> str:
    """The reason why a run that ended well left nothing in `workplace`, and its repair. `forked`: forked processes."""
    if not reports and list(workplace.glob("*.qdstrm")):
        return "nsys could not import its own stream (.qdstrm); labkit doctor names the repair"
    if not reports and window.name == PROFILER_API:
        return "the program never called cudaProfilerStart (torch.cuda.profiler.start()), or never on a GPU"
    if not reports and window.name is not None:
        times = "" if window.occurrence == 1 else f" {window.occurrence} times"
        return (
            f"the range {window.name!r} never opened{times}; the program must announce it (labkit's engine does, "
            "vanilla models do within labkit.engine.vanilla.annotate), in a process that was not forked"
        )
    if not reports:
        return f"the profiler left no report{full([workplace.parent])}"
    if not profiler.startswith("nsys"):
        nothing = "the program ran no operator of torch and opened no range in its first process"
        if forked:
            return f"{nothing}; {forks_unseen(forked, profiler)}"
        return (
            f"{nothing}, the only one that torch.profiler sees; if other processes do the work, profile under nsys "
            f"({given('source', 'nsys')})"
        )
    if contents(reports[0]).domains:
        return (
            f"the program opened NVTX domains, but no range arrived: nvtx {version('nvtx')} drops them under "
            f"{profiler}; pip install nvtx==0.2.11"
        )
    return (
        "the report holds no NVTX range and no GPU work: the program announces none, or does so in a forked process "
        "(start workers with spawn)"
    )
