"""NVTX ranges of an export, with their names."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.reader.database import NULL, Column, Export
from labkit.nsys.reader.limits import rank_number
from labkit.nsys.reader.names import Names
from labkit.nsys.trace import typed
from labkit.system.nvtx_ranges import RANK_MARK

TABLE = "NVTX_EVENTS"
PUSH_POP, START_END = (59, 70), (60, 71)  # values of eventType; 70 and 71 are imported ranges
MARK, DOMAIN_CREATE = 34, 75
COLUMNS = ("eventType", "globalTid", "endGlobalTid", "textId", "domainId")


def read_ranges(export: Export, *, last_of_all: bool) -> pd.DataFrame:
    """The ranges that began and ended on one thread, in the order of their starts, the outer first.

    A range that was still open ends with the last timestamp of all ranges, or with `last_of_all`, of all NVTX events.
    """
    rows = export.read(TABLE, COLUMNS, computed={"range_id": "rowid"})
    if rows is None:
        return typed("ranges", {})
    is_range = np.isin(rows["eventType"], PUSH_POP + START_END)
    timed = np.full(len(is_range), True) if last_of_all else is_range
    last = max(rows["start"][timed].max(initial=0), rows["end"][timed].max(initial=0))
    used = is_range & _on_one_thread(export, rows, is_range)
    rows = {name: column[used] for name, column in rows.items()}
    still_open = rows["end"] == NULL
    rows["end"] = np.where(still_open, last, rows["end"])
    rows["end"] = export.ends(rows, "ranges")

    order = np.lexsort((rows["range_id"], -rows["end"], rows["start"]))
    rows = {name: column[order] for name, column in rows.items()}
    style = np.isin(rows["eventType"], START_END).astype(np.int8)
    return typed(
        "ranges",
        {
            "range_id": rows["range_id"],
            "start_ns": rows["start"],
            "end_ns": rows["end"],
            **export.threads(rows["globalTid"]),
            "domain": _domains(export, rows),
            "name": _messages(export, rows),
            "style": pd.Categorical.from_codes(style, ["PushPop", "StartEnd"]),
            "open": still_open[order],
        },
    )


def read_ranks(export: Export) -> dict[int, int]:
    """The ranks that labkit's marks ("rank.3") give to processes, by globalPid >> 24."""
    columns = export.nullable(TABLE).keys()
    if not {"eventType", "globalTid", "text", "textId"} <= columns or "StringIds" not in export.tables:
        return {}
    message = "CAST(coalesce(text, value) AS TEXT) AS message"
    text = f"SELECT globalTid >> 24, {message} FROM {TABLE} LEFT JOIN StringIds ON textId = id"
    marks = export.rows(f"{text} WHERE eventType = {MARK} AND message GLOB '{RANK_MARK}[0-9]*'")
    digits = ((process, message.removeprefix(RANK_MARK)) for process, message in marks)
    return {process: rank_number(rank, f"the mark {RANK_MARK}N") for process, rank in digits if rank.isdecimal()}


def _on_one_thread(export: Export, rows: Mapping[str, Column], is_range: NDArray[np.bool_]) -> NDArray[np.bool_]:
    threadless = rows["globalTid"] == NULL
    moved = (rows["endGlobalTid"] != NULL) & (rows["endGlobalTid"] != rows["globalTid"]) & ~threadless
    for left_out, reason in (
        (threadless, "without a thread"),
        (moved, "that ended on another thread than they began on"),
    ):
        if count := int((is_range & left_out).sum()):
            export.skipped.append(f"{count} NVTX ranges {reason}: left out")
    if marks := int((rows["eventType"] == MARK).sum()):
        export.skipped.append(f"{marks} NVTX marks, which last no time: left out")
    return ~threadless & ~moved


def _domains(export: Export, rows: Mapping[str, Column]) -> pd.Categorical:
    """The domain of each range: the first name that its process gave to the domain, or "" without a name."""
    created: dict[tuple[int, int], str] = {}
    if "text" in export.nullable(TABLE):
        query = f"SELECT globalTid >> 24 & 0xFFFFFF, domainId, CAST(text AS TEXT) FROM {TABLE}"
        rows_of = export.rows(f"{query} WHERE eventType = {DOMAIN_CREATE} ORDER BY start DESC")
        created = {(pid, domain): text for pid, domain, text in rows_of if text}
    names = Names()
    pids, domains = (rows["globalTid"] >> 24 & 0xFFFFFF).tolist(), rows["domainId"].tolist()
    return names.categorical(names.codes(created.get(key, "") for key in zip(pids, domains, strict=True)))


def _messages(export: Export, rows: Mapping[str, Column]) -> pd.Categorical:
    """The message of each range: a registered string, or else the text of its event."""
    names = Names()
    codes = export.codes(rows["textId"], names)
    no_text = names.code("")
    if "text" in export.nullable(TABLE):
        texts = dict(export.rows(f"SELECT rowid, CAST(text AS TEXT) FROM {TABLE} WHERE text IS NOT NULL"))  # type: ignore[arg-type]
        unnamed = np.flatnonzero(codes == no_text)
        codes[unnamed] = names.codes(texts.get(row, "") for row in rows["range_id"][unnamed].tolist())
    return names.categorical(codes)
