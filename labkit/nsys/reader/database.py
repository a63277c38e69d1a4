"""A SQLite export of nsys as columns of numbers. Tables and columns may be missing."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.reader.limits import check_times
from labkit.nsys.reader.names import Names
from labkit.nsys.trace import TraceError

NULL = int(np.iinfo(np.int64).min)  # stands for NULL in a column of numbers
NAMES_AT_ONCE = 500
DAMAGED = "{name} is damaged or was cut short ({why}); export it again: nsys export --type sqlite REPORT.nsys-rep"

Column = NDArray[np.int64]


class Export:
    """An open export. nsys writes a table only if it has rows, so any may be missing; columns differ by version."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.tables = frozenset(row[0] for row in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'"))
        self.skipped: list[str] = []  # lines about data that were left out
        self.processes: dict[int, int] = {}  # numbers given to processes, by globalTid >> 24

    def nullable(self, table: str) -> dict[str, bool]:
        """The table's columns, and whether they may be NULL; empty for a missing table."""
        return {row[1]: not row[3] for row in self.rows(f'PRAGMA table_info("{table}")')}

    def rows(self, query: str) -> Iterator[tuple]:
        return self._connection.execute(query)

    def count(self, table: str) -> int:
        """The number of rows of a table."""
        return next(count for (count,) in self.rows(f'SELECT count(*) FROM "{table}"'))

    def read(
        self,
        table: str,
        requested: tuple[str, ...],
        *,
        may_lack: tuple[str, ...] = (),
        computed: Mapping[str, str] | None = None,
    ) -> dict[str, Column] | None:
        """The columns `start`, `end` and `requested` of a table, and the columns that `computed` has SQL for.

        A value is NULL if the file has NULL or lacks the column. A missing column is noted unless it is in `may_lack`.
        None without the table or its times.
        """
        nullable = self.nullable(table)
        if not nullable:
            return None
        if not {"start", "end"} <= nullable.keys():
            self.skipped.append(f"{table} has no start or no end: not read")
            return None
        select = {}
        for name in ("start", "end", *requested):
            if name in nullable:
                select[name] = f'coalesce("{name}", {NULL})' if nullable[name] else f'"{name}"'
            elif name not in may_lack:
                self.skipped.append(f"{table} has no {name}: taken as unknown")
        columns = self._numbers(table, select | dict(computed or {}))
        for name in ("start", "end"):
            check_times(columns[name][columns[name] != NULL], table)
        if untimed := int((columns["start"] == NULL).sum()):
            self.skipped.append(f"{untimed} rows of {table} without a start: left out")
            columns = {name: column[columns["start"] != NULL] for name, column in columns.items()}
        missing = np.full(len(columns["start"]), NULL)
        return columns | {name: missing for name in requested if name not in select}

    def _numbers(self, table: str, select: Mapping[str, str]) -> dict[str, Column]:
        rows = self._connection.execute(f'SELECT {", ".join(select.values())} FROM "{table}"')
        try:
            grid = np.fromiter(chain.from_iterable(rows), np.int64).reshape(-1, len(select))
        except (ValueError, TypeError, OverflowError) as error:
            raise sqlite3.DataError(f"in {table}: {error}") from None
        return {name: grid[:, index].copy() for index, name in enumerate(select)}

    def ends(self, columns: Mapping[str, Column], noun: str) -> Column:
        """The ends; an end before its start becomes the start. `noun` names the rows in the note about them."""
        start, end = columns["start"], columns["end"]
        if backwards := int((end < start).sum()):
            self.skipped.append(f"{backwards} {noun} with an end before the start: taken as of no length")
        return np.maximum(start, end)

    def process(self, keys: Column) -> NDArray[np.int32]:
        """The numbers of processes given as globalTid >> 24."""
        where, used = pd.factorize(keys)
        numbers = [self.processes.setdefault(key, len(self.processes)) for key in used.tolist()]
        return np.array(numbers, np.int32)[where]

    def threads(self, keys: Column) -> dict[str, NDArray[Any]]:
        """The columns that name a thread in a frame, for threads given as globalTid."""
        return {"process": self.process(keys >> 24), "tid": keys & 0xFFFFFF}

    def codes(self, ids: Column, names: Names, clean: Callable[[str], str] = str) -> NDArray[np.int32]:
        """The numbers in `names` of the texts in StringIds; the number of "" for unknown ids."""
        where, used = pd.factorize(ids)
        texts: dict[int, str] = {}
        for begin in range(0, len(used) if "StringIds" in self.tables else 0, NAMES_AT_ONCE):
            numbers = ", ".join(map(str, used[begin : begin + NAMES_AT_ONCE].tolist()))
            texts.update(self.rows(f"SELECT id, CAST(value AS TEXT) FROM StringIds WHERE id IN ({numbers})"))  # type: ignore[arg-type]
        return names.codes(clean(texts.get(number) or "") for number in used.tolist())[where]


@contextmanager
def opened(path: Path) -> Iterator[Export]:
    """Opens the export, read only. Raises TraceError, also for damage that shows later, while the export is read."""
    _check_length(path)
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            connection.text_factory = partial(str, encoding="utf-8", errors="replace")
            yield Export(connection)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # SQLite quotes a damaged schema with all its bytes
        raise TraceError(DAMAGED.format(name=path.name, why=error)) from None


def _check_length(path: Path) -> None:
    """Checks the file's length: SQLite notices missing pages late, and a table may seem to end before them."""
    with path.open("rb") as file:
        head = file.read(100)
    size, page = path.stat().st_size, int.from_bytes(head[16:18], "big")
    counted = head[24:28] == head[92:96]  # else the number of pages was written by an older SQLite
    expected = int.from_bytes(head[28:32], "big") * (65_536 if page == 1 else page) if counted else 0
    if len(head) < 100 or size < expected:
        raise TraceError(DAMAGED.format(name=path.name, why=f"{size} bytes of {max(expected, 100)}"))
