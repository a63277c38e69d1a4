"""Writes a trace as Chrome JSON, which Perfetto, chrome://tracing and labkit itself open.

Ranges and calls are on the threads that made them. GPU work is in further processes, one for each GPU of a process,
with a thread for each stream. An arrow leads from every call to the operations that it launched. Viewers expect a
thread's events to nest, so an event that crosses another one is on an extra thread, and its arguments name its own.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.attribution import attribute
from labkit.nsys.analysis.containment import NONE
from labkit.nsys.analysis.launches import first_calls
from labkit.nsys.analysis.nesting import order_by_nesting
from labkit.nsys.arrays import Ints, matching
from labkit.nsys.timeline.tracks import Placed, Tracks, tracks
from labkit.nsys.trace import Trace
from labkit.stages import DOMAIN, parse
from labkit.system.home import expanded
from labkit.system.whole_file import whole_file

CHUNK = 20_000  # events that are written at a time
COMPRESSION = 5
CATEGORIES = {"kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset", "graph": "gpu_graph"}
NAMES = {"memcpy": "Memcpy {}", "memset": "Memset", "graph": "CUDA graph"}
DRIVER = re.compile(r"^cu[A-Z]")  # cuLaunchKernel, while cudaLaunchKernel is the runtime's
ARGUMENTS = {  # columns of operations and calls, and their names in torch.profiler's files
    "device": "device",
    "stream": "stream",
    "correlation": "correlation",
    "graph_node": "graph node id",
    "bytes": "bytes",
    "registers": "registers per thread",
    "shared_bytes": "shared memory",
}
ALWAYS = ("device", "stream")  # written even if they are 0
PROCESS, THREAD = "process", "thread"  # arguments: an operation's launcher, and the own thread of a moved event


def write_chrome(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Writes `trace` to `path`, compressed if `path` ends with ".gz". Until it is complete, it has another name."""
    target = expanded(path)
    packed = target.suffix == ".gz"
    with whole_file(target) as part, gzip.open(part, "wb", COMPRESSION) if packed else part.open("wb") as file:
        for piece in _document(trace):
            file.write(piece.encode())
    return target


def _document(trace: Trace) -> Iterator[str]:
    about: dict[str, Any] = {"schemaVersion": 1, "displayTimeUnit": "ns"}
    ranks = {int(rank) for rank in trace.processes["rank"]}
    if trace.source.started_ns is not None:
        about["baseTimeNanoseconds"] = trace.source.started_ns
    if len(ranks) == 1 and -1 not in ranks:
        about["distributedInfo"] = {"rank": ranks.pop()}
    yield json.dumps(about)[:-1] + ', "traceEvents": [\n'
    places = tracks(trace)
    pieces = (
        _metadata(trace, places),
        _ranges(trace, places),
        _calls(trace, places),
        _operations(trace, places),
        _arrows(trace, places),
    )
    first = True
    for piece in pieces:
        for lines in piece:
            yield lines if first else ",\n" + lines
            first = False
    yield "\n]}\n"


def _metadata(trace: Trace, places: Tracks) -> Iterator[str]:
    """The names of processes and threads, and their order."""
    names = [str(name) or "process" for name in trace.processes["name"]] + ["process"] * len(places.pids)
    ranks = [f"rank {rank}" if rank >= 0 else "" for rank in trace.processes["rank"]] + [""] * len(places.pids)
    threads = {
        (int(places.pids[process]), int(tid)): str(name) for process, tid, name in trace.threads.itertuples(index=False)
    }
    for process, pid in enumerate(places.pids.tolist()):
        yield _about(pid, 0, "process_name", {"name": names[process]})
        yield _about(pid, 0, "process_sort_index", {"sort_index": process})
        if ranks[process]:
            yield _about(pid, 0, "process_labels", {"labels": ranks[process]})
    for pid, (process, device) in places.gpus.items():
        yield _about(pid, 0, "process_name", {"name": f"GPU {device} of {ranks[process] or names[process]}"})
        yield _about(pid, 0, "process_sort_index", {"sort_index": len(places.pids) + pid})
    on_cpu = sorted({*places.ranges.distinct(), *places.calls.distinct()})
    for pid, tid, own in on_cpu:
        name = threads.get((pid, own)) or f"thread {own}"
        yield _about(pid, tid, "thread_name", {"name": name if tid == own else f"{name}, overlapping"})
    for pid, tid, own in places.operations.distinct():
        yield _about(pid, tid, "thread_name", {"name": f"stream {own}" if tid == own else f"stream {own}, overlapping"})


def _about(pid: int, tid: int, name: str, args: dict[str, Any]) -> str:
    return json.dumps({"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": name, "args": args})


def _ranges(trace: Trace, places: Tracks) -> Iterator[str]:
    ranges = trace.ranges
    domains = [f'"domain": {json.dumps(str(text))}' if text else "" for text in ranges["domain"].cat.categories]
    categories = np.full(len(ranges), "user_annotation")
    yield from _spans(
        ranges, places.ranges, categories, [_of(ranges["domain"], domains), _stages(trace, np.arange(len(ranges)))]
    )


def _calls(trace: Trace, places: Tracks) -> Iterator[str]:
    calls = trace.calls
    categories = np.where(matching(calls["name"], DRIVER), "cuda_driver", "cuda_runtime")
    categories = np.where(calls["kind"] == "op", "cpu_op", categories)
    categories = np.where(calls["kind"] == "os", "os", categories)
    yield from _spans(calls, places.calls, categories, [_numbers(calls, "correlation")])


def _operations(trace: Trace, places: Tracks) -> Iterator[str]:
    operations = trace.operations
    args = [_numbers(operations, name) for name in ARGUMENTS]
    for name in ("grid", "block"):
        sides = ([_number(side) for side in text.split(" x ")] for text in operations[name].cat.categories)
        args.append(_of(operations[name], [f'"{name}": {json.dumps(sizes)}' if any(sizes) else "" for sizes in sides]))
    owner = places.pids[operations["process"].to_numpy()]
    args.append(np.array([f'"{PROCESS}": {pid}' for pid in owner.tolist()], object))
    args.append(_stages(trace, attribute(trace).range_of_operation))
    kinds = operations["kind"].cat.categories
    names = np.asarray(operations["name"].astype(str), object)
    for kind, name in NAMES.items():
        rows = np.flatnonzero(operations["kind"] == kind)
        names[rows] = [name.format(direction) for direction in names[rows]]
    categories = _of(operations["kind"], [CATEGORIES.get(kind, "") for kind in kinds])
    yield from _spans(operations.assign(name=pd.Categorical(names)), places.operations, categories, args)


def _arrows(trace: Trace, places: Tracks) -> Iterator[str]:
    """An arrow from the start of each call to the start of each operation that it launched."""
    call = first_calls(trace)
    operation = np.flatnonzero(call != NONE)
    call = call[operation]
    for at in range(0, len(operation), CHUNK):
        rows, launched = call[at : at + CHUNK], operation[at : at + CHUNK]
        tails, heads = (
            _columns(trace.calls, places.calls, rows),
            _columns(trace.operations, places.operations, launched),
        )
        yield ",\n".join(
            f"{_arrow('s', key, *tail)},\n{_arrow('f', key, *head)}"
            for key, tail, head in zip(launched.tolist(), tails, heads, strict=True)
        )


def _arrow(phase: str, key: int, pid: int, tid: int, start: int, end: int) -> str:
    """One end of an arrow, at the start of the event that it belongs to."""
    about = f'"id": {key}, "cat": "ac2g", "name": "ac2g", "pid": {pid}, "tid": {tid}, "ts": {start / 1e3:.3f}'
    return f'{{"ph": "{phase}", "bp": "e", {about}}}' if phase == "f" else f'{{"ph": "{phase}", {about}}}'


def _spans(frame: pd.DataFrame, placed: Placed, categories: NDArray, args: list[NDArray[np.object_]]) -> Iterator[str]:
    """Complete events, many at a time. `args`: parts of the arguments of each event; some are empty."""
    texts = frame["name"].cat
    names = [json.dumps(str(text)) for text in texts.categories]
    moved = np.flatnonzero(placed.tid != placed.own)
    thread = np.full(len(frame), "", object)
    thread[moved] = [f'"{THREAD}": {tid}' for tid in placed.own[moved].tolist()]
    start, end = (frame[column].to_numpy() for column in ("start_ns", "end_ns"))
    order = order_by_nesting(start, end, np.zeros(len(frame), np.int64))  # viewers nest events in the order of the file
    for at in range(0, len(frame), CHUNK):
        rows = order[at : at + CHUNK]
        parts = zip(*(part[rows].tolist() for part in (*args, thread)), strict=True)
        yield ",\n".join(
            f'{{"ph": "X", "cat": "{category}", "name": {names[code]}, "pid": {pid}, "tid": {tid}, '
            f'"ts": {start / 1e3:.3f}, "dur": {(end - start) / 1e3:.3f}, "args": {{{", ".join(filter(None, part))}}}}}'
            for (pid, tid, start, end), code, category, part in zip(
                _columns(frame, placed, rows),
                texts.codes.to_numpy()[rows].tolist(),
                categories[rows].tolist(),
                parts,
                strict=True,
            )
        )


def _columns(frame: pd.DataFrame, placed: Placed, rows: Ints) -> Iterator[tuple[int, int, int, int]]:
    """pid, tid, start and end."""
    start, end = (frame[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
    columns = (placed.pid[rows], placed.tid[rows], start, np.maximum(start, end))
    return zip(*(column.tolist() for column in columns), strict=True)


def _of(column: pd.Series, values: Sequence[object]) -> NDArray[np.object_]:
    """For each row of a categorical column, the value of its category."""
    return np.array([*values, ""], object)[column.cat.codes.to_numpy()]


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _numbers(frame: pd.DataFrame, name: str) -> NDArray[np.object_]:
    label = ARGUMENTS[name]
    return np.array(
        [f'"{label}": {value}' if value or name in ALWAYS else "" for value in frame[name].tolist()], object
    )


def _stages(trace: Trace, rows: Ints) -> NDArray[np.object_]:
    """Phase, layer and stage of ranges, as JSON; "" for ranges of other domains, and for row -1."""
    ranges = trace.ranges
    by_category = []
    for text in ranges["name"].cat.categories:
        label = parse(str(text))
        fields = {"phase": label.phase, "layer": label.layer, "stage": label.stage} if label else {}
        by_category.append(json.dumps({name: value for name, value in fields.items() if value is not None})[1:-1])
    stages = np.where(ranges["domain"] == DOMAIN, _of(ranges["name"], by_category), "")
    return np.append(stages, "")[rows]
