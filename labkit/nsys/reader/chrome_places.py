"""The kinds of the events of other recorders than PyTorch's profiler, by the names of their processes and threads.

JAX, Ascend and MTIA write a device's work as events of a process that is named after the device, on threads that are
named after its streams. All other events of such a process are derived from that work, or are not work: waits, and the
steps and modules that the work belongs to. Events of all other processes are calls of a runtime if they have a
correlation, else ranges.
"""

from __future__ import annotations

import re
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from labkit.nsys.arrays import Ints
from labkit.nsys.reader.chrome_events import COLUMNS, DEVICE_WORK, RUNTIMES, UNSTATED, Events
from labkit.nsys.reader.limits import GREATEST
from labkit.nsys.reader.names import Names
from labkit.nsys.trace import CALL_KINDS, KINDS, TraceError

DEVICE = re.compile(r"/device:(?!CPU)|Ascend Hardware|^(?:GPU|NPU|TPU|XPU|MTIA|HPU)\s*\d+\b", re.IGNORECASE)
DERIVED = re.compile(r"^(?:Overlap Analysis|Communication|HCCL)\b")  # of Ascend: sums of its streams' work
STREAM = re.compile(r"stream(?!.*submission)|queue(?<!submission queue)|dma", re.IGNORECASE)
OPS = "XLA Ops"  # of JAX on TPUs, which have no streams
WAIT = re.compile(r"(?:event|notify)[ _-]?(?:wait|record)|(?:wait|record)[ _-]?event", re.IGNORECASE)
QUEUED = ("enqueue", "dequeue")  # of Ascend's queue of tasks, with numbers of its own
COPIES = re.compile(r"memcpy|dma_request|SDMA|copy[ _-]?async", re.IGNORECASE)
MEMSET = re.compile(r"memset", re.IGNORECASE)
DIRECTIONS = {
    "HtoD": re.compile(r"h(?:ost)?[_ ]?(?:to|2)[_ ]?d", re.IGNORECASE),
    "DtoH": re.compile(r"d(?:evice)?[_ ]?(?:to|2)[_ ]?h", re.IGNORECASE),
    "DtoD": re.compile(r"d(?:evice)?[_ ]?(?:to|2)[_ ]?d|p(?:eer)?[_ ]?(?:to|2)[_ ]?p", re.IGNORECASE),
}
NUMBER = re.compile(r"(?:GPU|NPU|TPU|XPU|MTIA|HPU|stream|queue)\D{0,3}(\d{1,9})", re.IGNORECASE)

Columns = dict[str, Ints]


def placed(events: Events) -> dict[str, Columns]:
    """The rows of ranges, calls and operations, with the loose events. Other events are counted in `events.unread`."""
    tables = {name: events.table(name) for name in COLUMNS}
    loose = tables.pop("loose")
    if len(loose["pid"]):
        for name, rows in _by_place(events, loose, _pids(events, DEVICE)).items():
            tables[name] = {column: np.append(tables[name][column], rows[column]) for column in COLUMNS[name]}
    return tables


def _by_place(events: Events, loose: Columns, on_device: dict[int, int]) -> dict[str, Columns]:
    names, tasks = _texts(events.names, loose["name"]), _texts(events.shapes, loose["task"])
    categories = _texts(events.names, loose["category"])
    ran = np.isin(loose["pid"], list(on_device)) | np.isin(categories, list(DEVICE_WORK))
    runtime = np.isin(categories, list(RUNTIMES))
    works = ran & ~runtime & _on_streams(events, loose, ran)
    waits = works & _matching(WAIT, names, tasks)
    derived = ~ran & np.isin(loose["pid"], list(_pids(events, DERIVED)))
    _say_unread(events, loose, (ran & ~works) | derived)
    if count := int(waits.sum()):
        events.unread["waits of devices"] += count
    called = (loose["correlation"] != 0) & ~np.isin(categories, list(QUEUED))
    host = ~ran & ~derived
    return {
        "operations": _operations(events, _rows(loose, works & ~waits), on_device),
        "calls": _table(
            "calls",
            _rows(loose, host & (runtime | called)),
            kind=CALL_KINDS.index("api"),
            inputs=events.details.code(""),
        ),
        "ranges": _table("ranges", _rows(loose, host & ~runtime & ~called), domain=events.names.code("")),
    }


def _pids(events: Events, pattern: re.Pattern[str]) -> dict[int, int]:
    """The processes with matching names or labels, and for each the number in its name, else its position."""
    named: dict[int, int] = {}
    for pid in sorted({*events.process_names, *events.process_labels}):
        texts = [texts.get(pid, "") for texts in (events.process_names, events.process_labels)]
        if any(pattern.search(text) for text in texts):
            number = next((match[1] for text in texts if (match := NUMBER.search(text))), None)
            named[pid] = len(named) if number is None else int(number)
    return named


def _on_streams(events: Events, loose: Columns, ran: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether each event is on a stream: a thread named like one or without a name, else that of XLA's operators."""
    threads = _threads(loose)
    names = {thread: events.thread_names.get(thread, "") for thread in set(compress(threads, ran))}
    streams = {thread for thread, name in names.items() if not name or STREAM.search(name)}
    with_streams = {pid for pid, _ in streams}
    streams |= {thread for thread, name in names.items() if name == OPS and thread[0] not in with_streams}
    return np.array([thread in streams for thread in threads], bool)


def _operations(events: Events, rows: Columns, on_device: dict[int, int]) -> Columns:
    names, tasks = _texts(events.names, rows["name"]), _texts(events.shapes, rows["task"])
    directions = _texts(events.shapes, rows["direction"])
    copies, sets = _matching(COPIES, names, tasks), _matching(MEMSET, names, tasks)
    kind = np.where(sets, KINDS.index("memset"), np.where(copies, KINDS.index("memcpy"), KINDS.index("kernel")))
    for at in np.flatnonzero(copies & ~sets).tolist():
        description = f"{directions[at]} {names[at]}"
        direction = next(
            (direction for direction, pattern in DIRECTIONS.items() if pattern.search(description)), "unknown"
        )
        rows["name"][at] = events.names.code(direction)
    rows["name"][sets] = events.names.code("memset")
    of_process = np.array([on_device.get(pid, 0) for pid in rows["pid"].tolist()], np.int64)
    threads = _threads(rows)
    of_thread = np.array([_number(events.thread_names.get(thread, ""), thread[1]) for thread in threads], np.int64)
    device = np.where(rows["device"] == UNSTATED, of_process, rows["device"])
    if len(device) and np.abs(device).max() > GREATEST:
        raise TraceError(f"got a device of number {int(device[np.abs(device).argmax()])}, expected one below 2^31")
    no_text = events.shapes.code("")
    return _table(
        "operations",
        rows,
        kind=kind,
        device=device,
        stream=np.where(rows["stream"] == UNSTATED, of_thread, rows["stream"]),
        bytes=np.maximum(rows["bytes"], 0),
        collective=events.details.code(""),
        grid=no_text,
        block=no_text,
    )


def _table(name: str, rows: Columns, **columns: Ints | int) -> Columns:
    """A table of COLUMNS: its columns in `columns`, else in `rows`, else 0."""
    values: dict[str, Ints | int] = {**rows, **columns}
    count = len(rows["pid"])
    return {column: np.full(count, values.get(column, 0), np.int64) for column in COLUMNS[name]}


def _say_unread(events: Events, loose: Columns, which: NDArray[np.bool_]) -> None:
    """Counts events that are not read, by the names of process and thread."""
    pairs, counts = np.unique(np.column_stack([loose["pid"][which], loose["tid"][which]]), axis=0, return_counts=True)
    for (pid, tid), count in zip(pairs.tolist(), counts.tolist(), strict=True):
        process, thread = events.process_names.get(pid, f"process {pid}"), events.thread_names.get((pid, tid), "")
        events.unread[f"of {process!r}" + (f", {thread!r}" if thread else "")] += count


def _threads(rows: Columns) -> list[tuple[int, int]]:
    """The pid and tid of each row."""
    return list(zip(rows["pid"].tolist(), rows["tid"].tolist(), strict=True))


def _number(name: str, otherwise: int) -> int:
    match = NUMBER.search(name)
    return int(match[1]) if match else otherwise


def _rows(columns: Columns, which: NDArray[np.bool_]) -> Columns:
    return {name: column[which] for name, column in columns.items()}


def _texts(names: Names, codes: Ints) -> NDArray[np.object_]:
    return np.asarray(names.categorical(codes).astype(str), object)


def _matching(pattern: re.Pattern[str], *columns: NDArray[np.object_]) -> NDArray[np.bool_]:
    """Whether each row has a matching text in any of the columns."""
    matches = np.zeros(len(columns[0]), bool)
    for column in columns:
        matching = {text: bool(pattern.search(text)) for text in set(column.tolist())}
        matches |= np.array([matching[text] for text in column.tolist()], bool)
    return matches
