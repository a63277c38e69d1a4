"""The events of a Chrome trace as rows of numbers, collected one by one while the file is read."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np

from labkit.nsys.arrays import Ints
from labkit.nsys.reader.limits import LATEST_NS, rank_number
from labkit.nsys.reader.names import Names
from labkit.nsys.trace import CALL_KINDS, COLLECTIVE, INPUTS, KINDS, TraceError
from labkit.stages import DOMAIN, parse

RANGE = "user_annotation"
# The second line of each is what PyTorch called its categories before 1.11.
CALLS = {"cuda_runtime": "api", "cuda_driver": "api", "cpu_op": "op", "os": "os"} | {
    "Runtime": "api", "Operator": "op", "Operator range": "op"
}  # fmt: skip
OPERATIONS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset", "gpu_graph": "graph"} | {
    "Kernel": "kernel", "Memcpy": "memcpy", "Memset": "memset"
}  # fmt: skip
TIMELESS = ("M", "s", "t", "f", "b", "e", "n", "N", "D")  # names, arrows and objects
COPY = re.compile(r"Memcpy (?P<kind>[^(]*\w)(?: \((?P<memory>[^()]*)\))?")  # "Memcpy HtoD (Pageable -> Device)"
RANK = re.compile(r"rank (\d+)")
LATEST_US = LATEST_NS // 1000

EVERY = ("pid", "tid", "start_ns", "end_ns", "name")
LAUNCH = ("device", "stream", "correlation", "graph_node", "bytes", "grid", "block", "registers", "shared_bytes")
COLUMNS = {
    "ranges": (*EVERY, "range_id", "domain"),
    "calls": (*EVERY, "kind", "correlation", "external", "inputs"),
    "operations": (*EVERY, "kind", *LAUNCH, "external", "memory", "collective"),
}


class Events:
    """Events of the kinds that a Trace has. The rows hold the numbers of texts, which are in `names`, `shapes` (grids,
    blocks, memories) and `told` (inputs of operators, arguments of collectives, as JSON).

    labkit's own files say more than torch.profiler's: the domain of a range, which process launched an operation, and
    the thread of what is drawn beside it. `count`: elements so far, `known`: those that are events of any kind,
    `unpaired`: those with a begin or an end only, `backwards`: those that end before they start, `untimed`: operations
    at time 0 without length, which CUPTI could not time, `unread`: how many there are of each category that a Trace has
    no place for.
    """

    def __init__(self) -> None:
        self.count = self.known = self.unpaired = self.backwards = self.untimed = 0
        self.names, self.shapes, self.told = Names(), Names(), Names()
        self.told.code("")
        self.unread: Counter[str] = Counter()
        self.process_names: dict[int, str] = {}
        self.ranks: dict[int, int] = {}
        self.thread_names: dict[tuple[int, int], str] = {}
        self._words = Names()
        self._rows = {table: array("q") for table in COLUMNS}

    def add(self, event: Mapping[str, Any]) -> None:
        """Adds an event. One that is damaged raises TypeError, ValueError, KeyError, AttributeError or
        InvalidOperation.
        """
        self.count += 1
        phase, category = event.get("ph"), event.get("cat")
        self.known += phase is not None
        if phase == "X" and isinstance(category, str):
            if category in CALLS:
                self._call(event, CALLS[category])
            elif category in OPERATIONS:
                self._operation(event, OPERATIONS[category])
            elif category == RANGE:
                self._range(event)
            else:
                self.unread[category] += 1
        elif phase == "M":
            self._name(event)
        elif phase in ("B", "E"):
            self.unpaired += 1
        elif phase not in TIMELESS:
            self.unread[str(category or "marks")] += 1

    def table(self, name: str) -> dict[str, Ints]:
        columns = COLUMNS[name]
        rows = np.frombuffer(self._rows[name], np.int64).reshape(-1, len(columns))
        return {column: rows[:, index].copy() for index, column in enumerate(columns)}

    def _start(self, event: Mapping[str, Any], name: str | None = None) -> tuple[int, int, int, int, int]:
        """The columns that every kind of event has."""
        start, length = _ns(event["ts"]), _ns(event.get("dur", 0))
        self.backwards += length < 0
        return (
            *self._place(event),
            start,
            start + max(length, 0),
            self.names.code(str(event["name"]) if name is None else name),
        )

    def _range(self, event: Mapping[str, Any]) -> None:
        name = str(event["name"])
        domain = event.get("args", {}).get("domain", DOMAIN if parse(name) else "")
        self._rows["ranges"].extend((*self._start(event), self.count, self.names.code(str(domain))))

    def _call(self, event: Mapping[str, Any], kind: str) -> None:
        args = event.get("args", {})
        correlation = int(args.get("correlation", 0)) if kind == "api" else 0
        external = int(args.get("External id", args.get("external id", 0)))
        inputs = {name: args[key] for name, key in INPUTS.items() if key in args} if "Input Dims" in args else {}
        told = self.told.code(json.dumps(inputs, default=str) if inputs else "")
        self._rows["calls"].extend((*self._start(event), CALL_KINDS.index(kind), correlation, external, told))

    def _operation(self, event: Mapping[str, Any], kind: str) -> None:
        args, name, memory = event.get("args", {}), str(event["name"]), ""
        if kind == "memcpy" and (copy := COPY.match(name)):
            name, memory = copy["kind"], copy["memory"] or ""
        elif kind in ("memset", "graph"):
            name = kind
        start = self._start(event, name)
        if start[2] == start[3] == 0:
            self.untimed += 1
            return
        launch = (
            int(args.get("device", event.get("pid", 0))),
            int(args.get("stream", event.get("tid", 0))),
            int(args.get("correlation", 0)),
            int(args.get("graph node id", 0)),
            int(args.get("bytes", 0)),
            self.shapes.code(" x ".join(map(str, args.get("grid", ())))),
            self.shapes.code(" x ".join(map(str, args.get("block", ())))),
            int(args.get("registers per thread", 0)),
            int(args.get("shared memory", 0)),
            int(args.get("External id", args.get("external id", 0))),
            self.shapes.code(memory),
            self.told.code(_collective(args) if "Collective name" in args else ""),
        )
        self._rows["operations"].extend((*start, KINDS.index(kind), *launch))

    def _name(self, event: Mapping[str, Any]) -> None:
        pid, tid = self._place(event)
        if event["name"] == "process_name":
            self.process_names[pid] = str(event["args"]["name"])
        elif event["name"] == "thread_name":
            self.thread_names[pid, tid] = str(event["args"]["name"])
        elif event["name"] == "process_labels" and (rank := RANK.fullmatch(str(event["args"]["labels"]))):
            self.ranks[pid] = rank_number(rank[1], "process_labels")

    def _place(self, event: Mapping[str, Any]) -> tuple[int, int]:
        args = event.get("args", {})
        pid, tid = args.get("process", event.get("pid", 0)), args.get("thread", event.get("tid", 0))
        return pid if type(pid) is int else self._number(pid), tid if type(tid) is int else self._number(tid)

    def _number(self, word: object) -> int:
        """The number of a process or thread that is given as text; for a text that is no number, a negative one."""
        try:
            return int(str(word))
        except ValueError:
            return -1 - self._words.code(str(word))


def _collective(args: Mapping[str, Any]) -> str:
    return json.dumps({name: args[key] for name, key in COLLECTIVE.items() if key in args}, default=str)


def _ns(microseconds: int | Decimal | str) -> int:
    if isinstance(microseconds, str):
        microseconds = Decimal(microseconds)
    if not -LATEST_US < microseconds < LATEST_US:
        raise TraceError(f"got a time of {microseconds:.4g} us, expected less than {LATEST_US} us (146 years)")
    return round(microseconds * 1000)
