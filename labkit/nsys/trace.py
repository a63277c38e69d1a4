"""What a profiler saw, whichever it was, as one set of typed frames on one clock.

Times are int64 nanoseconds from the start of the capture. A thread is named by `process`, the row of its process in
`Trace.processes`, and `tid`; one process number stands for one process of one rank, whatever ids the systems gave them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pandas as pd

from labkit.system.errors import UserError

RANGES = {
    "range_id": "int64",  # nsys: the row in NVTX_EVENTS; else the number of the event
    "start_ns": "int64",
    "end_ns": "int64",  # of a range that was still open: the last timestamp of the ranges
    "process": "int32",
    "tid": "int64",
    "domain": "category",  # "" where it has no name
    "name": "category",  # the message alone; "" where it has none
    "style": "category",  # "PushPop" or "StartEnd"
    "open": "bool",
}
OPERATIONS = {
    "start_ns": "int64",
    "end_ns": "int64",
    "process": "int32",
    "kind": "category",  # one of KINDS
    "name": "category",  # a kernel's demangled name; "HtoD", "DtoH", ... of a copy; "memset"; "graph"
    "device": "int32",
    "stream": "int64",
    "correlation": "int64",  # to the API call of the same process; 0: none
    "graph_node": "int64",  # of a kernel that a CUDA graph played; 0: none
    "bytes": "int64",  # of copies and memsets; 0: not a copy
    "memory": "category",  # of a copy: "Pageable -> Device"; "" where the file does not tell
    "grid": "category",  # "108 x 1 x 1"; "" where there is none
    "block": "category",
    "registers": "int32",  # per thread
    "shared_bytes": "int32",  # static and dynamic shared memory of a block
    "external": "int64",  # to the operator of PyTorch that it works for; 0: none
    "collective": "category",  # of a kernel of NCCL: what it exchanges, see COLLECTIVE, as JSON; "" where unknown
}
CALLS = {
    "start_ns": "int64",
    "end_ns": "int64",
    "process": "int32",
    "tid": "int64",
    "kind": "category",  # one of CALL_KINDS
    "name": "category",
    "correlation": "int64",  # 0: none
    "external": "int64",  # of an operator: its own number, which `operations` name; of an API call: its operator's
    "inputs": "category",  # of an operator: what it was called with, see INPUTS, as JSON; "" where it was not recorded
}
GRAPH_NODES = {  # when the nodes of CUDA graphs were made, and by whom: that is where their NVTX ranges are
    "node": "int64",
    "original": "int64",  # the node that this one is an instance of; 0: none
    "start_ns": "int64",
    "process": "int32",
    "tid": "int64",
}
PROCESSES = {
    "pid": "int64",
    "rank": "int32",  # -1: not known
    "name": "category",
}
THREADS = {
    "process": "int32",
    "tid": "int64",
    "name": "category",
}
DEVICES = {
    "process": "int32",
    "device": "int32",
    "name": "category",
    "bandwidth_gb_s": "float64",  # of its memory, as its maker says; 0: not told
}
CALL_KINDS = ("api", "op", "os")  # CUDA's runtime or driver; an operator of PyTorch on the CPU; the system's libraries
INPUTS = {"dims": "Input Dims", "types": "Input type", "strides": "Input Strides", "values": "Concrete Inputs"}
COLLECTIVE = {  # names here and in PyTorch's traces
    "name": "Collective name",
    "group": "Process Group Name",
    "description": "Process Group Description",
    "ranks": "Process Group Ranks",
    "size": "Group size",
    "sequence": "Seq",
    "dtype": "dtype",
    "in_elements": "In msg nelems",
    "out_elements": "Out msg nelems",
    "in_split": "In split size",
    "out_split": "Out split size",
}
KINDS = ("kernel", "memcpy", "memset", "graph")  # "graph": a whole CUDA graph, traced without its nodes
SCHEMA: Mapping[str, Mapping[str, str]] = {
    "ranges": RANGES,
    "operations": OPERATIONS,
    "calls": CALLS,
    "graph_nodes": GRAPH_NODES,
    "processes": PROCESSES,
    "threads": THREADS,
    "devices": DEVICES,
}


class TraceError(UserError):
    """A file that cannot be read as a trace, or a trace that lacks what was asked of it: got, expected, what to do."""


@dataclass(frozen=True)
class Source:
    """Where a trace comes from. `skipped`: one line for each thing in the file that was left out, and why.

    `unread`: the kinds of events that a Trace has no place for, with their numbers: "4,262 python_function".
    `unread_work`: the part of `unread` that is work of a device. With any, nobody can tell when the device was idle.
    """

    profiler: str  # "nsys", "torch.profiler" or "a Chrome trace"
    version: str  # of the profiler's file: "2022.4.2.1, schema 3.0.0"; "" where the file does not tell
    files: tuple[str, ...]  # names without their folders
    started_ns: int | None = None  # of the capture's clock 0, since the epoch
    skipped: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    unread_work: tuple[str, ...] = ()

    @classmethod
    def kept(cls, about: Mapping[str, Any], files: tuple[str, ...]) -> Source:
        """The source that `dataclasses.asdict` and JSON turned into `about`, with the names that its files have now."""
        told = {each: tuple(about[each]) for each in ("skipped", "unread", "unread_work")}
        return cls(**{**about, "files": files, **told})


def empty(frame: str) -> pd.DataFrame:
    """A frame without rows, with the columns and types of SCHEMA."""
    return typed(frame, {})


def typed(frame: str, columns: Mapping[str, object]) -> pd.DataFrame:
    """A frame of SCHEMA from columns of any array type; those not given are 0, "" or False in every row."""
    rows = max((len(column) for column in columns.values()), default=0)  # type: ignore[arg-type]
    made = {}
    for name, dtype in SCHEMA[frame].items():
        column = columns.get(name)
        if dtype == "category":
            made[name] = _categories(column, rows)
        else:
            made[name] = np.zeros(rows, dtype) if column is None else np.asarray(column).astype(dtype, copy=False)
    return pd.DataFrame(made, copy=False)


def _categories(column: object, rows: int) -> pd.Categorical:
    if column is None:
        return pd.Categorical.from_codes(np.zeros(rows, np.int8), categories=[""])
    return column if isinstance(column, pd.Categorical) else pd.Categorical(column)


@dataclass(frozen=True, eq=False)
class Trace:
    """The frames of SCHEMA, each sorted by `start_ns` where it has one. Frames that a file lacks are empty."""

    source: Source
    ranges: pd.DataFrame = field(default_factory=lambda: empty("ranges"))
    operations: pd.DataFrame = field(default_factory=lambda: empty("operations"))
    calls: pd.DataFrame = field(default_factory=lambda: empty("calls"))
    graph_nodes: pd.DataFrame = field(default_factory=lambda: empty("graph_nodes"))
    processes: pd.DataFrame = field(default_factory=lambda: empty("processes"))
    threads: pd.DataFrame = field(default_factory=lambda: empty("threads"))
    devices: pd.DataFrame = field(default_factory=lambda: empty("devices"))

    @property
    def on_gpu(self) -> bool:
        """Whether there is GPU work; without any, a range's time is the CPU's."""
        return len(self.operations) > 0

    @property
    def frames(self) -> dict[str, pd.DataFrame]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name in SCHEMA}
