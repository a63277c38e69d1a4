"""The trace of any profiler as one set of typed frames on one clock.

Times are int64 nanoseconds from the start of the capture. A thread is named by `process`, the row of its process in
`Trace.processes`, and `tid`. A process number stands for one process of one rank, even if two systems gave equal ids.
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
    "end_ns": "int64",  # the last timestamp of all ranges for a range that was still open
    "process": "int32",
    "tid": "int64",
    "domain": "category",  # "" for a domain without a name
    "name": "category",  # the message alone; "" without a message
    "style": "category",  # "PushPop" or "StartEnd"
    "open": "bool",
}
OPERATIONS = {
    "start_ns": "int64",
    "end_ns": "int64",
    "process": "int32",
    "kind": "category",  # one of KINDS
    "name": "category",  # a kernel's demangled name; "HtoD", "DtoH", ... for a copy; "memset"; "graph"
    "device": "int32",
    "stream": "int64",
    "correlation": "int64",  # number of the API call of the same process; 0: none
    "graph_node": "int64",  # of a kernel that a CUDA graph launched; 0: none
    "bytes": "int64",  # of copies and memsets; 0: unknown, or not a copy
    "memory": "category",  # of a copy: "Pageable -> Device"; "" if the file lacks it
    "grid": "category",  # "108 x 1 x 1"; "" without a grid
    "block": "category",
    "registers": "int32",  # per thread
    "shared_bytes": "int32",  # static and dynamic shared memory of a block
    "external": "int64",  # number of the PyTorch operator that the work is for; 0: none
    "collective": "category",  # of a kernel of NCCL: its exchange as JSON, see COLLECTIVE; "" if unknown
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
    "inputs": "category",  # of an operator: its inputs as JSON, see INPUTS; "" if not recorded
}
GRAPH_NODES = {  # time and thread of the creation of each node of a CUDA graph, which NVTX ranges enclose
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
    "bandwidth_gb_s": "float64",  # of its memory, by its maker's figures; 0: unknown
}
CALL_KINDS = ("api", "op", "os")  # CUDA's runtime or driver; an operator of PyTorch on the CPU; the system's libraries
INPUTS = {"dims": "Input Dims", "types": "Input type", "strides": "Input Strides", "values": "Concrete Inputs"}
COLLECTIVE = {  # keys of `collective`, with their names in PyTorch's traces
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


EXPORT_AGAIN = "export the report with an nsys of a known version: see `labkit doctor`"  # for work that is not read


class TraceError(UserError):
    """A file that is not a readable trace, or a trace that lacks needed data: got, expected, what to do."""


class EmptyTraceError(TraceError):
    """A whole trace without any range, call or operation."""


@dataclass(frozen=True)
class Source:
    """The origin of a trace, and the parts of its file that were not read."""

    profiler: str  # "nsys", "torch.profiler" or "a Chrome trace"
    version: str  # of the profiler's file: "2022.4.2.1, schema 3.0.0"; "" if the file lacks it
    files: tuple[str, ...]  # names without their folders
    started_ns: int | None = None  # of the capture's clock 0, since the epoch
    skipped: tuple[str, ...] = ()  # a line for each thing in the file that was left out, with the reason
    unread: tuple[str, ...] = ()  # kinds of events that a Trace has no column for, with counts: "4,262 python_function"
    unread_work: tuple[str, ...] = ()  # kinds in `unread` that are a device's work; with any, its idle time is unknown

    @property
    def not_read(self) -> str:
        """The work of a device that was not read, in words; "" without any."""
        return f"work of the GPU that is not read ({', '.join(self.unread_work)})" if self.unread_work else ""

    @classmethod
    def kept(cls, about: Mapping[str, Any]) -> Source:
        """The source that `dataclasses.asdict` and JSON turned into `about`."""
        values: dict[str, Any] = {name: tuple(value) if type(value) is list else value for name, value in about.items()}
        return cls(**values)


def empty(frame: str) -> pd.DataFrame:
    """A frame without rows, with the columns and types of SCHEMA."""
    return typed(frame, {})


def typed(frame: str, columns: Mapping[str, object]) -> pd.DataFrame:
    """A frame of SCHEMA from columns of any array type. Missing columns are 0, "" or False in every row.

    A number or a text stands for every row. A column of categories may be a list of texts.
    """
    rows = max((len(column) for column in columns.values() if not isinstance(column, str | int)), default=0)  # type: ignore[arg-type]
    arrays = {}
    for name, dtype in SCHEMA[frame].items():
        if dtype == "category":
            arrays[name] = _categories(columns.get(name, ""), rows)
        else:
            column = columns.get(name, 0)
            values = np.full(rows, column) if isinstance(column, int) else np.asarray(column)
            arrays[name] = values.astype(dtype, copy=False)
    return pd.DataFrame(arrays, copy=False)


def _categories(column: object, rows: int) -> pd.Categorical:
    if isinstance(column, str):
        return pd.Categorical.from_codes(np.zeros(rows, np.int8), pd.Index([column], dtype="str"))
    if isinstance(column, pd.Categorical):
        return column
    codes, texts = pd.factorize(np.asarray(column, object))
    return pd.Categorical.from_codes(codes, pd.Index(texts, dtype="str"))


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
        """Whether there is GPU work. Without it, a range's time is the CPU's."""
        return len(self.operations) > 0

    @property
    def frames(self) -> dict[str, pd.DataFrame]:
        """The frames by their names in SCHEMA."""
        return {frame.name: getattr(self, frame.name) for frame in fields(self) if frame.name in SCHEMA}
