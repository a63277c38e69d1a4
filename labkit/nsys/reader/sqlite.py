"""Reads files of `nsys export --type sqlite`, from 2022.4 to 2026, into a Trace.

Two generations differ in more than names. Exports with EXPORT_META_DATA (2022.4) end ranges that were still open with
the last timestamp of all NVTX events; exports with META_DATA_EXPORT (2023.4 and later) with the last timestamp of the
ranges.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from labkit.nsys.reader import cuda, nvtx
from labkit.nsys.reader.database import Export, opened
from labkit.nsys.reader.limits import check_times
from labkit.nsys.reader.names import Names
from labkit.nsys.trace import Source, Trace, TraceError, typed

NEWEST_SCHEMA = (3, 25)
OLD_META, META = "EXPORT_META_DATA", "META_DATA_EXPORT"
START_TIME = "TARGET_INFO_SESSION_START_TIME"
READ = frozenset({nvtx.TABLE, *cuda.CALLS, *cuda.NODES, *cuda.OPERATIONS})


def read_sqlite(path: Path) -> Trace:
    """The trace of one export. TraceError for a damaged file, and for one that is not an export of nsys."""
    with opened(path) as export:
        if not export.tables & (READ | {OLD_META, META}):
            raise TraceError(
                f"{path.name} is a SQLite database without any table of Nsight Systems; expected an export: "
                "nsys export --type sqlite REPORT.nsys-rep"
            )
        version = _version(export)
        ranges = nvtx.read_ranges(export, last_of_all=OLD_META in export.tables)
        operations, calls, nodes = cuda.read_operations(export), cuda.read_calls(export), cuda.read_graph_nodes(export)
        processes, threads = _processes(export), _threads(export)
        devices, unread = cuda.read_devices(export), dict(_unread(export))
        work = [f"{count:,} {table}" for table, count in unread.items() if cuda.WORK_TABLE.match(table)]
        others = tuple(f"{count:,} {table}" for table, count in unread.items() if table not in cuda.OPERATIONS)
        source = Source("nsys", version, (path.name,), _started(export), tuple(export.skipped), others, tuple(work))
        return Trace(source, ranges, operations, calls, nodes, processes, threads, devices)


def _version(export: Export) -> str:
    """The versions in words. Notes a newer schema."""
    meta = next((table for table in (META, OLD_META) if table in export.tables), None)
    if meta is None:
        return ""
    values = {str(name): str(value) for name, value in export.rows(f"SELECT name, value FROM {meta}")}
    schema = values.get("EXPORT_SCHEMA_VERSION", "unknown")
    if tuple(int(part) for part in re.findall(r"\d+", schema)[:2]) > NEWEST_SCHEMA:
        newest = ".".join(map(str, NEWEST_SCHEMA))
        export.skipped.append(f"schema {schema} is newer than {newest}, the newest known")
    return f"{values.get('EXPORT_PRODUCT_VERSION', 'unknown version')}, schema {schema}"


def _unread(export: Export) -> Iterator[tuple[str, int]]:
    """The tables whose events a Trace cannot hold, or that lack their times, with the number of rows of each."""
    for table in sorted(export.tables):
        columns = export.nullable(table).keys()
        if table in READ:
            unread = table in cuda.OPERATIONS and not columns >= {"start", "end"}
        else:
            unread = bool(columns & {"start", "timestamp", "rawTimestamp"}) or bool(cuda.WORK_TABLE.match(table))
        if unread and (count := export.count(table)):
            yield table, count


def _started(export: Export) -> int | None:
    if "utcEpochNs" not in export.nullable(START_TIME):
        return None
    started = next(
        (started for (started,) in export.rows(f"SELECT CAST(utcEpochNs AS INTEGER) FROM {START_TIME}")), None
    )
    check_times(started or 0, START_TIME)
    return started


def _processes(export: Export) -> pd.DataFrame:
    """The processes with recorded events, in the order of their numbers."""
    process_names: dict[int, str] = {}
    if {"globalPid", "name"} <= export.nullable("PROCESSES").keys():
        query = (
            "SELECT globalPid >> 24, CAST(name AS TEXT) FROM PROCESSES WHERE globalPid IS NOT NULL AND name IS NOT NULL"
        )
        process_names = dict(export.rows(query))  # type: ignore[arg-type]
    ranks, keys = nvtx.read_ranks(export), list(export.processes)
    return typed(
        "processes",
        {
            "pid": [key & 0xFFFFFF for key in keys],
            "rank": [ranks.get(key, -1) for key in keys],
            "name": [process_names.get(key, "") for key in keys],
        },
    )


def _threads(export: Export) -> pd.DataFrame:
    """The named threads of these processes."""
    if not {"globalTid", "nameId"} <= export.nullable("ThreadNames").keys():
        return typed("threads", {})
    columns = "CAST(globalTid AS INTEGER), CAST(nameId AS INTEGER)"
    query = f"SELECT {columns} FROM ThreadNames WHERE globalTid IS NOT NULL AND nameId IS NOT NULL"
    rows: dict[int, int] = dict(export.rows(query))  # type: ignore[arg-type]
    rows = {tid: name for tid, name in rows.items() if tid >> 24 in export.processes}
    tids, names = np.array(list(rows), np.int64), Names()
    name = names.categorical(export.codes(np.array(list(rows.values()), np.int64), names))
    return typed("threads", {**export.threads(tids), "name": name})
