"""Checks whether a run left a usable report, and names the cause where it did not."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from labkit.nsys.capture.command import PROFILER_API, Window
from labkit.nsys.trace import TraceError
from labkit.stages import Phase, step_message

RANGE_TYPES = "59, 60, 70, 71"  # push/pop and start/end ranges, live and imported
DOMAIN_TYPE = 75
FULL = 100_000_000  # free bytes; with fewer nsys may find no room for its stream
STEP_NAMES = ", ".join(f"'{step_message(phase)}'" for phase in Phase)


@dataclass(frozen=True)
class Contents:
    """How many rows an export has of each kind; `steps`: labkit's ranges around whole steps."""

    ranges: int = 0
    steps: int = 0
    domains: int = 0
    operations: int = 0


def contents(export: Path) -> Contents:
    """What is in an nsys export. Raises TraceError for a damaged one."""
    try:
        with closing(sqlite3.connect(f"{export.resolve().as_uri()}?mode=ro", uri=True)) as rows:
            tables = {row[0] for row in rows.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            ranges, steps, domains = 0, 0, 0
            if "NVTX_EVENTS" in tables:
                counted = (
                    f"SELECT sum(eventType IN ({RANGE_TYPES})), sum(value IN ({STEP_NAMES})), "
                    f"sum(eventType = {DOMAIN_TYPE}) FROM NVTX_EVENTS LEFT JOIN StringIds ON textId = id"
                )
                ranges, steps, domains = (count or 0 for count in rows.execute(counted).fetchone())
            operations = sum(
                rows.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
                for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY")
                if table in tables
            )
    except sqlite3.DatabaseError as error:
        raise TraceError(f"the export {export.name} is damaged ({error}); is the disk full?") from None
    return Contents(ranges, steps, domains, operations)


def lost(found: list[Contents], announced: int, window: Window) -> str | None:
    """What to say where fewer steps arrived than the program counted itself (`announced`); None if all arrived.

    Of a run that is captured in part the expected number is not known, so nothing is said.
    """
    arrived = sum(each.steps for each in found)
    if window.name is not None or arrived >= announced:
        return None
    return (
        f"the program announced {announced} steps, but {arrived} arrived in the report: the profiler lost ranges; take "
        "the capture again, alone on the machine (labkit doctor tries one out)"
    )


def full(places: Iterable[Path]) -> str:
    """What to say of those `places`, to which the profiler writes, that are nearly full; an empty text if none is."""
    free = {place: shutil.disk_usage(place).free for place in places}
    return "".join(f"; {place} is full ({free[place] / 1e6:.0f} MB free)" for place in free if free[place] < FULL)


def cause(workplace: Path, reports: list[Path], window: Window, profiler: str) -> str:
    """Why a run that ended well left nothing in `workplace`, and what to do about it."""
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
    if profiler.startswith("nsys") and contents(reports[0]).domains:
        return (
            f"the program opened NVTX domains, but no range arrived: nvtx {version('nvtx')} drops them under "
            f"{profiler}; pip install nvtx==0.2.11"
        )
    return (
        "the report holds no NVTX range and no GPU work: the program announces none, or does so in a forked process "
        "(start workers with spawn)"
    )
