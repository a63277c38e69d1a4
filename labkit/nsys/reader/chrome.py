"""Reads a Chrome trace as torch.profiler (Kineto) and labkit write it, plain or gzip, event by event, into a Trace.

Its times are microseconds with up to three decimals since `baseTimeNanoseconds`, or since the epoch if that is missing.
These are too many digits for a float, so they are read as decimals.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from decimal import InvalidOperation
from pathlib import Path
from typing import Any

import ijson
import numpy as np
import pandas as pd

from labkit.nsys.arrays import Ints
from labkit.nsys.reader.chrome_events import Events
from labkit.nsys.reader.chrome_places import placed
from labkit.nsys.reader.json_text import DeepOrLong, JsonText
from labkit.nsys.reader.limits import LATEST_NS, rank_number
from labkit.nsys.trace import CALL_KINDS, KINDS, Source, Trace, TraceError, typed

GZIP = b"\x1f\x8b"
ABOUT = {
    "base": re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d+)'),
    "rank": re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[\]]*?"rank"\s*:\s*(\d+)'),
    "schema": re.compile(rb'"schemaVersion"\s*:\s*(\d+)'),
}
DEVICES = re.compile(rb'"deviceProperties"\s*:\s*\[([^\]]*)')
DEVICE = re.compile(rb'"id"\s*:\s*(\d{1,9})\s*,\s*"name"\s*:\s*("[^"\\]*")')
DIGITS = 30  # more than any of these numbers has; int() refuses texts of thousands of digits
DAY_NS = 86_400_000_000_000
CHROME = "a Chrome trace"
CUT_SHORT = "is not complete JSON ({why}); a profiler that is killed leaves half a file: record again"
ANEW = "copy the file anew, or record again"
EXPECTED = 'expected a Chrome trace, {"traceEvents": [...]} or a list of events, as torch.profiler exports it'


def read_chrome(path: Path) -> Trace:
    """The trace of one file. TraceError: cut short, not JSON, not a trace, or a trace without readable events."""
    try:
        events, text = _read(path, repair=False)
        repaired = False
    except _NoUtf8:
        events, text = _read(path, repair=True)
        repaired = True
    if not events.known and (events.count or not (text.is_list or b'"traceEvents"' in text.ends)):
        raise TraceError(f"{path.name} is JSON, but no trace; {EXPECTED}")
    notes = ["the list of events has no end: its recorder may have been killed, and the last events lost"]
    notes = notes * text.unclosed + ["bytes that are not UTF-8 are shown as \ufffd"] * repaired
    return _trace(events, _about(text.ends, path.name), _devices_of(text.ends), path.name, notes)


class _NoUtf8(Exception):
    """The text has bytes that are not UTF-8."""


def _read(path: Path, *, repair: bool) -> tuple[Events, JsonText]:
    events = Events()
    with ExitStack() as stack:
        file: Any = stack.enter_context(path.open("rb"))
        packed = file.read(2) == GZIP
        file.seek(0)
        text: JsonText | None = None
        try:
            unpacked = stack.enter_context(gzip.open(file)) if packed else file
            text = JsonText(unpacked, lambda: events.count, repair=repair)
            for event in ijson.items(text, "item" if text.is_list else "traceEvents.item"):
                _checked(events, path.name, events.add, event)
            _checked(events, path.name, events.pair)
            return events, text
        except EOFError:
            raise TraceError(f"{path.name} {CUT_SHORT.format(why='its gzip data end too early')}") from None
        except (zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{path.name} is not complete JSON: its gzip data are damaged ({error}); {ANEW}") from None
        except (ijson.JSONError, UnicodeDecodeError, InvalidOperation) as error:
            message = str(error)
            if "invalid bytes in UTF8" in message and not repair:
                raise _NoUtf8 from None
            if "premature EOF" in message or (text is not None and text.unclosed):
                raise TraceError(f"{path.name} {CUT_SHORT.format(why='it ends too early')}") from None
            raise TraceError(f"{path.name} is not JSON: {_cause(error)}; {EXPECTED}") from None
        except DeepOrLong as error:
            raise TraceError(f"{path.name} is no trace: {error}; {EXPECTED}") from None


def _checked(events: Events, name: str, step: Callable[..., None], *event: Any) -> None:
    """Takes a step that adds events. An error names the element of the file."""
    try:
        step(*event)
    except TraceError as error:
        raise TraceError(f"{name}: element {events.element} is no event: {error}; {EXPECTED}") from None


def _cause(error: Exception) -> str:
    """The cause of a parser's error, with the text around it."""
    if isinstance(error, InvalidOperation):
        return "it has a number with an exponent beyond any"
    if isinstance(error, UnicodeDecodeError):
        return "it has half of a surrogate pair in a text"
    message = str(error)
    if message.startswith(("b'", 'b"')):  # ijson's message about a text that is not UTF-8
        message = ast.literal_eval(message).decode(errors="replace")
    problem, _, rest = message.partition("\n")
    place = rest.partition("\n")[0].strip()
    word = next((word for word in ("NaN", "Infinity", "nan", "inf") if word in place), None)
    problem = problem.removeprefix("lexical error: ").removeprefix("parse error: ")
    problem = f"{word} is no number of JSON" if word else problem
    return f"{problem.rstrip('.')}, at {place!r}"


def _about(ends: bytes, name: str) -> dict[str, int]:
    """The numbers of ABOUT that the file states next to its events."""
    texts = {key: match[1].decode()[:DIGITS] for key, pattern in ABOUT.items() if (match := pattern.search(ends))}
    about = {key: int(digits) for key, digits in texts.items()}
    rank_number(texts.get("rank", "0"), f"distributedInfo of {name}")
    if about.get("base", 0) >= LATEST_NS:
        raise TraceError(f"got baseTimeNanoseconds = {about['base']} in {name}, expected less than {LATEST_NS}")
    return about


def _devices_of(ends: bytes) -> dict[int, str]:
    """The names of the devices by their numbers."""
    match = DEVICES.search(ends)
    return {int(number): json.loads(name) for number, name in DEVICE.findall(match[1])} if match else {}


def _trace(
    events: Events, about: dict[str, int], devices: dict[int, str], name: str, notes: Sequence[str] = ()
) -> Trace:
    """The trace of the events. Its clock starts with the file's, or at the first event if that is a day later."""
    tables = placed(events)
    first = min((int(table["start_ns"].min()) for table in tables.values() if len(table["pid"])), default=0)
    origin = first if first >= DAY_NS else 0
    tables["operations"]["pid"] = _launchers(**tables)
    pids = np.unique(np.concatenate([table["pid"] for table in tables.values()]))
    frames = {}
    for table, columns in tables.items():
        columns |= {"start_ns": columns["start_ns"] - origin, "end_ns": columns["end_ns"] - origin}
        columns["process"] = np.searchsorted(pids, columns["pid"])
        order = np.lexsort((-columns["end_ns"], columns["start_ns"]))
        frames[table] = {column: values[order] for column, values in columns.items()}
    base = about.get("base", 0) + origin
    version = f"schema {about['schema']}" if "schema" in about else ""
    left_out = (
        (events.unpaired, "with a begin or an end only: left out"),
        (events.backwards, "with an end before the start: taken as of no length"),
        (events.untimed, "of a GPU without times: left out"),
    )
    unread = tuple(f"{count:,} {kind}" for kind, count in events.unread.most_common())
    skipped = (*notes, *(f"{count} events {reason}" for count, reason in left_out if count))
    return Trace(
        Source("torch.profiler" if events.of_kineto else CHROME, version, (name,), base or None, skipped, unread),
        _ranges(events, frames["ranges"]),
        _operations(events, frames["operations"]),
        _calls(events, frames["calls"]),
        processes=_processes(events, pids, about.get("rank", -1)),
        threads=_threads(events, frames["ranges"], frames["calls"]),
        devices=_devices(devices, frames["operations"]),
    )


def _launchers(ranges: dict[str, Ints], calls: dict[str, Ints], operations: dict[str, Ints]) -> Ints:
    """The process of each operation, from its API call. Kineto gives an operation its device's number instead."""
    own, on_cpu = operations["pid"], np.union1d(ranges["pid"], calls["pid"])
    if not len(on_cpu):
        return own
    order = np.argsort(calls["correlation"], kind="stable")
    place = np.searchsorted(calls["correlation"][order], operations["correlation"])
    call = np.append(order, -1)[place]
    has_call = (operations["correlation"] != 0) & (
        np.append(calls["correlation"], 0)[call] == operations["correlation"]
    )
    launcher = np.where(has_call, np.append(calls["pid"], 0)[call], on_cpu[0])
    return np.where(np.isin(own, on_cpu), own, launcher)


def _ranges(events: Events, columns: dict[str, Ints]) -> pd.DataFrame:
    name = events.names.categorical(columns["name"]).remove_unused_categories()
    domain = events.names.categorical(columns["domain"]).remove_unused_categories()
    return typed("ranges", {**columns, "name": name, "domain": domain, "style": "PushPop"})


def _calls(events: Events, columns: dict[str, Ints]) -> pd.DataFrame:
    texts = {
        "kind": pd.Categorical.from_codes(columns["kind"], list(CALL_KINDS)),
        "name": events.names.categorical(columns["name"]).remove_unused_categories(),
        "inputs": events.details.categorical(columns["inputs"]).remove_unused_categories(),
    }
    return typed("calls", {**columns, **texts})


def _operations(events: Events, columns: dict[str, Ints]) -> pd.DataFrame:
    texts = {
        "kind": pd.Categorical.from_codes(columns["kind"], list(KINDS)),
        "name": events.names.categorical(columns["name"]).remove_unused_categories(),
        "grid": events.shapes.categorical(columns["grid"]),
        "block": events.shapes.categorical(columns["block"]),
        "memory": events.shapes.categorical(columns["memory"]).remove_unused_categories(),
        "collective": events.details.categorical(columns["collective"]).remove_unused_categories(),
    }
    return typed("operations", {**columns, **texts})


def _processes(events: Events, pids: Ints, rank: int) -> pd.DataFrame:
    names = [events.process_names.get(pid, "") for pid in pids.tolist()]
    ranks = [events.ranks.get(pid, rank) for pid in pids.tolist()]
    return typed("processes", {"pid": pids, "rank": ranks, "name": names})


def _threads(events: Events, *used: dict[str, Ints]) -> pd.DataFrame:
    """The names of the threads of ranges and calls."""
    columns = [np.concatenate([table[name] for table in used]) for name in ("process", "pid", "tid")]
    places = np.unique(np.column_stack(columns), axis=0)
    names = [events.thread_names.get((pid, tid), "") for _, pid, tid in places.tolist()]
    return typed("threads", {"process": places[:, 0], "tid": places[:, 2], "name": names})


def _devices(named: dict[int, str], operations: dict[str, Ints]) -> pd.DataFrame:
    """The devices of operations, if they have names."""
    used = np.unique(np.column_stack([operations["process"], operations["device"]]), axis=0)
    used = used[np.isin(used[:, 1], [number for number, name in named.items() if name])]
    names = [named[device] for device in used[:, 1].tolist()]
    return typed("devices", {"process": used[:, 0], "device": used[:, 1], "name": names})
