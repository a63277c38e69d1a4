"""Scrubbing: removes the run's environment, its user, its host and its other processes from a report.

nsys writes the whole environment of a run into its reports, secrets included. The scrubbed report is a new file with
only the data that are known to be harmless and useful, and not a copy from which known leaks were cut.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path, PurePath

import numpy as np
import pandas as pd

from labkit.nsys.capture.redaction import Redaction
from labkit.nsys.trace import SCHEMA, Trace, TraceError
from labkit.system.errors import RunError
from labkit.system.home import expanded
from labkit.system.whole_file import whole_file

# All numbers of these tables are kept, and the text of the columns named here. That is enough for `nsys stats`.
TEXT_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "NVTX_EVENTS": ("text",),
    "CUPTI_ACTIVITY_KIND_KERNEL": (),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (),
    "CUPTI_ACTIVITY_KIND_MEMSET": (),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (),
    "CUDA_GRAPH_EVENTS": (),
    "CUDA_GRAPH_NODE_EVENTS": (),
    "PROFILER_OVERHEAD": (),
    "ANALYSIS_DETAILS": (),
    "TARGET_INFO_SESSION_START_TIME": (),
    "TARGET_INFO_GPU": ("name", "chipName", "memoryType"),
    "ThreadNames": (),
    "PROCESSES": ("name",),
}
STRING_COLUMNS = ("textId", "nameId", "demangledName", "shortName", "mangledName")  # they hold an id of StringIds
SIZES = ("grid", "block")  # columns of a trace, texts that hold only sizes
CALLED_WITH = ("inputs", "collective")  # JSON, in which a secret may be escaped
EXPORT_TABLES = ("EXPORT_META_DATA", "META_DATA_EXPORT")
EXPORT_ROWS = ("EXPORT_PRODUCT_NAME", "EXPORT_PRODUCT_VERSION", "EXPORT_PRODUCT_DATE", "EXPORT_SCHEMA_VERSION%")


def scrub(
    report: Path, target: Path, environment: Mapping[str, str] | None = None, *, command: Sequence[str] = ()
) -> dict[str, int]:
    """Writes the nsys export `report` (SQLite) to `target` without its user, its host and its environment.

    The target keeps the tables of TEXT_COLUMNS, the strings that they use, the version rows, and the processes and
    threads that did something. In every kept string, the values of the run's environment variables (found in the
    report) and of `environment` (default: this process's) are replaced, and so are its user, its host and the secrets
    in the words of `command`. Short values and words stay, and so do names of labkit's stages and of PyTorch's
    operators. Returns the number of changed strings for each variable.

    Raises TraceError if `report` is not a SQLite file, RunError if the disk is full, OSError if `target` cannot be
    written.
    """
    environment = os.environ if environment is None else environment
    report, target = expanded(report), expanded(target)
    uri = f"{report.resolve().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as old:
            variables = [*environment.items(), *_recorded_environment(old)]
            clean = Redaction.of_run(variables, command=command, hosts=_hosts(old))
            with whole_file(target) as path, closing(sqlite3.connect(path)) as new:
                _copy(old, new, clean)
                new.commit()
            return dict(clean.replaced)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError) and ("full" in str(error) or "I/O" in str(error)):
            raise RunError(
                f"{target} could not be written: {error}; free some space, or choose another folder"
            ) from None
        raise TraceError(
            f"{report} could not be read: {error}; expected a report that nsys exported as SQLite"
        ) from None


def _copy(old: sqlite3.Connection, new: sqlite3.Connection, clean: Redaction) -> None:
    schema = dict(old.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table' AND sql NOT NULL").fetchall())
    columns = {name: [row[1] for row in old.execute(f"PRAGMA table_info({_quoted(name)})")] for name in schema}
    enums = [name for name in schema if name.startswith("ENUM_")]
    for name in (*TEXT_COLUMNS, *EXPORT_TABLES, *enums, "StringIds"):
        if name in schema:
            new.execute(schema[name])
    strings: set[int] = set()
    active = _active(old, columns)
    for name in TEXT_COLUMNS:
        if name in schema:
            strings |= _copy_table(old, new, name, columns[name], clean, active)
    for name in enums:
        _insert(new, name, columns[name], old.execute(f"SELECT * FROM {_quoted(name)}"))
    for name in EXPORT_TABLES:
        if name in schema:
            where = " OR ".join("name LIKE ?" for _ in EXPORT_ROWS)
            rows = old.execute(f"SELECT name, value FROM {name} WHERE {where}", EXPORT_ROWS)
            _insert(new, name, ["name", "value"], rows)
    if "StringIds" in schema:
        used_strings = (
            (number, clean(value))
            for number, value in old.execute("SELECT id, value FROM StringIds")
            if number in strings
        )
        _insert(new, "StringIds", ["id", "value"], used_strings)


def _copy_table(
    old: sqlite3.Connection,
    new: sqlite3.Connection,
    name: str,
    columns: list[str],
    clean: Redaction,
    active: tuple[set[int], set[int]],
) -> set[int]:
    """Copies the rows and values of a table that may be kept; returns the ids of the strings that the rows use."""
    used: set[int] = set()
    text = [column in TEXT_COLUMNS[name] for column in columns]
    refers = [at for at, column in enumerate(columns) if column in STRING_COLUMNS]
    processes, threads = active
    required = [row[3] and "TEXT" in row[2].upper() for row in old.execute(f"PRAGMA table_info({_quoted(name)})")]

    def kept_rows() -> Iterator[tuple[object, ...]]:
        for row in old.execute(f"SELECT {', '.join(map(_quoted, columns))} FROM {_quoted(name)}"):
            by_column = dict(zip(columns, row, strict=True))
            if name == "PROCESSES" and by_column.get("globalPid") not in processes:
                continue
            if name == "ThreadNames" and by_column.get("globalTid") not in threads:
                continue
            values: list[object] = []
            for value, is_text, must in zip(row, text, required, strict=True):
                if isinstance(value, str):
                    value = clean(PurePath(value).name if name == "PROCESSES" else value) if is_text else None
                elif isinstance(value, bytes):
                    value = None
                values.append("" if value is None and must else value)
            used.update(row[at] for at in refers if isinstance(row[at], int))
            yield tuple(values)

    _insert(new, name, columns, kept_rows())
    return used


def _active(old: sqlite3.Connection, columns: Mapping[str, list[str]]) -> tuple[set[int], set[int]]:
    """The globalPids and globalTids of the kept ranges, API calls and GPU work."""
    processes: set[int] = set()
    threads: set[int] = set()
    for name in TEXT_COLUMNS:
        if name in ("PROCESSES", "ThreadNames"):
            continue
        if "globalTid" in columns.get(name, ()):
            threads.update(_numbers(old, f"SELECT DISTINCT globalTid FROM {name}"))
        if "globalPid" in columns.get(name, ()):
            processes.update(_numbers(old, f"SELECT DISTINCT globalPid FROM {name}"))
    processes.update(thread & ~0xFFFFFF for thread in threads)
    return processes, threads


def _numbers(report: sqlite3.Connection, query: str) -> Iterator[int]:
    return (number for (number,) in report.execute(query) if number is not None)


def _insert(new: sqlite3.Connection, name: str, columns: list[str], rows: Iterable[tuple[object, ...]]) -> None:
    places = ", ".join("?" * len(columns))
    names = ", ".join(map(_quoted, columns))
    new.executemany(f"INSERT INTO {_quoted(name)} ({names}) VALUES ({places})", rows)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _recorded_environment(report: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    """The variables that nsys wrote into the report: NAME=value, or NAME="value", one or several in a text."""
    for table in ("META_DATA_CAPTURE", "TARGET_INFO_SYSTEM_ENV", "StringIds"):
        for text in _texts(report, table):
            for entry in text.split("\0"):
                name, equals, value = entry.partition("=")
                if equals and re.fullmatch(r"[A-Za-z_]\w*", name):
                    yield name, value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value


def _texts(report: sqlite3.Connection, table: str) -> Iterator[str]:
    if not report.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
        return
    where = " WHERE instr(value, char(0)) > 0" if table == "StringIds" else ""
    yield from (row[0] for row in report.execute(f"SELECT value FROM {table}{where}") if isinstance(row[0], str))


def _hosts(report: sqlite3.Connection) -> set[str]:
    hosts = {os.uname().nodename} if hasattr(os, "uname") else set()
    for table in (*EXPORT_TABLES, "TARGET_INFO_SYSTEM_ENV", "META_DATA_CAPTURE"):
        if report.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
            names = ("EXPORT_HOST", "EXPORT_USER", "Hostname", "DEVICE_DISPLAY_NAME")
            query = f"SELECT value FROM {table} WHERE name IN (?, ?, ?, ?)"
            hosts.update(row[0] for row in report.execute(query, names) if row[0])
    return hosts


def scrub_trace(trace: Trace, clean: Redaction) -> Trace:
    """`trace` with all its names redacted by `clean`, and without the arguments of operators and collectives.

    torch.profiler writes no environment, but a program can put anything into the names of its ranges, and the system
    puts commands into the names of processes and threads.
    """
    frames = {name: _scrubbed(name, frame, clean) for name, frame in trace.frames.items()}
    return replace(trace, **frames)


def _scrubbed(name: str, frame: pd.DataFrame, clean: Redaction) -> pd.DataFrame:
    frame = frame.assign(**{column: pd.Categorical([""] * len(frame)) for column in CALLED_WITH if column in frame})
    texts = [column for column, kind in SCHEMA[name].items() if kind == "category" and column not in SIZES]
    return frame.assign(**{column: _replaced(frame[column], clean) for column in texts})


def _replaced(column: pd.Series, clean: Redaction) -> pd.Categorical:
    """The redacted column. Two names may become equal, so the categories get new numbers."""
    numbers, names = pd.factorize(np.array([clean(str(name)) for name in column.cat.categories], object))
    codes = column.cat.codes.to_numpy()
    return pd.Categorical.from_codes(np.where(codes < 0, -1, numbers[codes] if len(numbers) else -1), names)
