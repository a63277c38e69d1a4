"""The events of a Chrome trace as rows of numbers, collected one by one while the file is read.

A category of PyTorch's profiler says what an event is. Events of other recorders have other categories or none. They
stay `loose` until the names of processes and threads are known, which may come last
(`labkit.nsys.reader.chrome_places`).
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from labkit.nsys.arrays import Ints
from labkit.nsys.reader.chrome_pairs import Half, pairs
from labkit.nsys.reader.limits import GREATEST, LATEST_NS, rank_number
from labkit.nsys.reader.names import Names
from labkit.nsys.trace import CALL_KINDS, COLLECTIVE, INPUTS, KINDS, TraceError
from labkit.stages import DOMAIN, parse
from labkit.system.shown import shown_value

RANGE = "user_annotation"
# The second line of each has the names of PyTorch's categories before 1.11.
CALLS = {"cuda_runtime": "api", "cuda_driver": "api", "cpu_op": "op", "os": "os"} | {
    "Runtime": "api", "Operator": "op", "Operator range": "op"
}  # fmt: skip
OPERATIONS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset", "gpu_graph": "graph"} | {
    "concurrent_kernel": "kernel", "Kernel": "kernel", "Memcpy": "memcpy", "Memset": "memset"
}  # fmt: skip
# Other devices than GPUs: one category holds their work, their waits and the events of a queue on the CPU.
RUNTIMES = frozenset({"mtia_runtime", "xpu_runtime", "xpu_driver", "privateuse1_runtime", "privateuse1_driver"})
DEVICE_WORK = frozenset({"mtia_ccp_events"})
NO_PLACE = frozenset(  # categories of PyTorch's profiler that a Trace cannot hold
    {
        *("python_function", "gpu_user_annotation", "overhead", "Trace", "cuda_sync", "cuda_event", "hpu_op"),
        *("cpu_instant_event", "cuda_profiler_range", "external_correlation", "gpu_pm_counter", "collective_comm"),
        *("mtia_insight", "mtia_counters", "glow_runtime"),
    }
)
KINETO = NO_PLACE | RUNTIMES | DEVICE_WORK | {RANGE, *CALLS, *OPERATIONS}
ARROWS = ("s", "t", "f")
ASYNCHRONOUS = ("b", "e", "n", "S", "T", "p", "F")
COPY = re.compile(r"Memcpy (?P<kind>[^(]*\w)(?: \((?P<memory>[^()]*)\))?")  # "Memcpy HtoD (Pageable -> Device)"
RANK = re.compile(r"rank (\d+)")
LATEST_US = LATEST_NS // 1000
INT64 = (1 << 63) - 1

UNSTATED = -1  # the device or stream of a loose event that does not state it, or states -1; no text has this number
TASK, DIRECTION = ("Task Type", "task_type"), ("direction", "kind", "operation")
LOOSE_NUMBERS = {  # by column: the names of a loose event's argument in the files of several recorders
    "device": ("device", "device_id", "Device Id", "Physic Device Id"),
    "stream": ("stream", "stream_id", "Stream Id", "Physic Stream Id"),
    "correlation": ("correlation", "connection_id", "correlation_id"),
    "bytes": ("bytes", "size", "size(B)"),
}
EVERY = ("pid", "tid", "start_ns", "end_ns", "name")
LAUNCH = ("device", "stream", "correlation", "graph_node", "bytes", "grid", "block", "registers", "shared_bytes")
COLUMNS = {
    "ranges": (*EVERY, "range_id", "domain"),
    "calls": (*EVERY, "kind", "correlation", "external", "inputs"),
    "operations": (*EVERY, "kind", *LAUNCH, "external", "memory", "collective"),
    "loose": (*EVERY, "range_id", "category", "task", *LOOSE_NUMBERS, "direction", "memory"),
}
DETAILS = ("memcpy_details", "memset_details")  # of JAX: "kind_src:pageable kind_dst:device size:4096 dest:0 async:1"
SIDES = {"pageable": "H", "pinned": "H", "device": "D", "array": "D"}


class Events:
    """Events of the kinds that a Trace has. `pair` makes one event of a begin and an end on one thread.

    Rows hold the numbers of their texts. The texts are in `names`, `shapes` (grids, blocks, memories) and `details`
    (inputs of operators and arguments of collectives, as JSON).

    labkit's own files hold more than torch.profiler's: the domain of a range, the process that launched an operation,
    and the real thread of an event that is drawn on another thread.
    """

    def __init__(self) -> None:
        self.count = self.known = 0  # elements so far; elements with a phase
        self.element = 0  # number of the element that is read; of a pair, the begin's number
        self.backwards = 0  # events that end before they start
        self.untimed = 0  # operations at time 0 without length, which CUPTI could not time
        self.unpaired = 0  # events with a begin or an end only
        self.of_kineto = False  # whether any event has a category of PyTorch's profiler
        self.names, self.shapes, self.details = Names(), Names(), Names()
        self.details.code("")
        self.unread: Counter[str] = Counter()  # number of events of each kind that a Trace cannot hold
        self.process_names: dict[int, str] = {}
        self.process_labels: dict[int, str] = {}
        self.ranks: dict[int, int] = {}
        self.thread_names: dict[tuple[int, int], str] = {}
        self._words = Names()
        self._rows = {table: array("q") for table in COLUMNS}
        self._halves: dict[tuple[int, int], list[Half]] = {}  # by process and thread

    def add(self, event: Any) -> None:
        """Adds an event. Raises TraceError for a damaged event, and for an element that is not an object."""
        self.count = self.element = self.count + 1
        if not isinstance(event, dict):
            raise TraceError(f"got {shown_value(event)}, expected an object")
        phase, category = event.get("ph"), event.get("cat")
        self.known += phase is not None
        if phase == "X":
            self._complete(event, category if isinstance(category, str) else "")
        elif phase in ("B", "E"):
            ts = _microseconds(event, "ts")
            half = Half(phase == "B", ts, self.element, _name(event), event.get("cat"), _args(event))
            self._halves.setdefault(self._place(event), []).append(half)
        elif phase == "M":
            self._describe(event)
        elif phase in ASYNCHRONOUS:
            self.unread["asynchronous events"] += 1
        elif phase == "C":
            self.unread["counters"] += 1
        elif event and phase not in ARROWS:
            self.unread[str(category or "marks")] += 1

    def pair(self) -> None:
        """Adds the events that consist of a begin and an end; to be called after the last `add`."""
        for (pid, tid), halves in self._halves.items():
            whole = pairs(halves)
            self.unpaired += len(halves) - 2 * len(whole)
            for begin, end in whole:
                self.element = begin.element
                args = {**begin.args, **end.args}
                event = {"name": begin.name, "ts": begin.ts, "dur": end.ts - begin.ts, "args": args}
                category = begin.category if isinstance(begin.category, str) else ""
                self._complete({**event, "pid": pid, "tid": tid}, category)
        self._halves.clear()

    def table(self, name: str) -> dict[str, Ints]:
        columns = COLUMNS[name]
        rows = np.frombuffer(self._rows[name], np.int64).reshape(-1, len(columns))
        return {column: rows[:, index].copy() for index, column in enumerate(columns)}

    def _complete(self, event: Mapping[str, Any], category: str) -> None:
        if category in CALLS:
            self._call(event, CALLS[category])
        elif category in OPERATIONS:
            self._operation(event, OPERATIONS[category])
        elif category == RANGE:
            self._range(event)
        elif category in NO_PLACE:
            self.unread[category] += 1
        else:
            self._loose(event, category)
        self.of_kineto |= category in KINETO

    def _start(self, event: Mapping[str, Any], name: str | None = None) -> tuple[int, int, int, int, int]:
        """The values of the columns of EVERY."""
        start, length = _ns(event, "ts"), _ns(event, "dur") if event.get("dur") is not None else 0
        self.backwards += length < 0
        code = self.names.code(_name(event) if name is None else name)
        return (*self._place(event), start, start + max(length, 0), code)

    def _range(self, event: Mapping[str, Any]) -> None:
        domain = _args(event).get("domain", DOMAIN if parse(_name(event)) else "")
        self._rows["ranges"].extend((*self._start(event), self.element, self.names.code(str(domain))))

    def _call(self, event: Mapping[str, Any], kind: str) -> None:
        args = _args(event)
        correlation = self._number(args, "correlation") if kind == "api" else 0
        external = self._number(args, "External id", "external id")
        inputs = {name: args[key] for name, key in INPUTS.items() if key in args} if "Input Dims" in args else {}
        inputs_code = self.details.code(json.dumps(inputs, default=str) if inputs else "")
        self._rows["calls"].extend((*self._start(event), CALL_KINDS.index(kind), correlation, external, inputs_code))

    def _operation(self, event: Mapping[str, Any], kind: str) -> None:
        args, name, memory = _args(event), _name(event), ""
        if kind == "memcpy" and (copy := COPY.match(name)):
            name, memory = copy["kind"], copy["memory"] or ""
        elif kind in ("memset", "graph"):
            name = kind
        pid, tid, start_ns, end_ns, code = self._start(event, name)
        if start_ns == end_ns == 0:
            self.untimed += 1
            return
        launch = (
            _amount(args, "device", pid),
            self._number(args, "stream", default=tid),
            self._number(args, "correlation"),
            self._number(args, "graph node id"),
            max(self._number(args, "bytes"), 0),
            self.shapes.code(_shape(args, "grid")),
            self.shapes.code(_shape(args, "block")),
            _amount(args, "registers per thread"),
            _amount(args, "shared memory"),
            self._number(args, "External id", "external id"),
            self.shapes.code(memory),
            self.details.code(_collective(args) if "Collective name" in args else ""),
        )
        self._rows["operations"].extend((pid, tid, start_ns, end_ns, code, KINDS.index(kind), *launch))

    def _loose(self, event: Mapping[str, Any], category: str) -> None:
        args = _with_details(_args(event))
        numbers = [
            self._number(args, *keys, default=UNSTATED if column in ("device", "stream") else 0)
            for column, keys in LOOSE_NUMBERS.items()
        ]
        texts = [next((str(args[key]) for key in keys if key in args), "") for keys in (TASK, DIRECTION)]
        task, direction, memory = map(self.shapes.code, (*texts, _memory(args)))
        start = self._start(event)
        self._rows["loose"].extend((*start, self.element, self.names.code(category), task, *numbers, direction, memory))

    def _describe(self, event: Mapping[str, Any]) -> None:
        pid, tid = self._place(event)
        kind, args = event.get("name"), _args(event)
        if kind == "process_name":
            self.process_names[pid] = str(args.get("name", ""))
        elif kind == "thread_name":
            self.thread_names[pid, tid] = str(args.get("name", ""))
        elif kind == "process_labels":
            self.process_labels[pid] = labels = str(args.get("labels", ""))
            if rank := RANK.fullmatch(labels):
                self.ranks[pid] = rank_number(rank[1], "process_labels")

    def _place(self, event: Mapping[str, Any]) -> tuple[int, int]:
        """The process and thread: the event's own, or the ones that labkit wrote into the arguments."""
        args = _args(event)
        return (
            self._number(args, "process") if "process" in args else self._number(event, "pid"),
            self._number(args, "thread") if "thread" in args else self._number(event, "tid"),
        )

    def _number(self, args: Mapping[str, Any], *keys: str, default: int = 0) -> int:
        """The number under the first of `keys` that is present.

        A text, or a number beyond 64 bits, gets a negative number of its own: an identity, not an amount, and never
        UNSTATED.
        """
        value = next((args[key] for key in keys if args.get(key) is not None), default)
        if type(value) is int and -INT64 <= value <= INT64:
            return value
        try:
            number = Decimal(str(value))
            if number.is_finite() and abs(number) <= INT64:
                return int(number)
        except InvalidOperation:
            pass
        return UNSTATED - 1 - self._words.code(str(value))


def _name(event: Mapping[str, Any]) -> str:
    return str(event.get("name", ""))


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of an event; none if they are null, or not an object."""
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _with_details(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments with the details of a copy, which JAX puts into one text, and the direction that these tell."""
    texts = [text for key in DETAILS if isinstance(text := args.get(key), str)]
    details = dict(word.split(":", 1) for word in " ".join(texts).split() if ":" in word)
    sides = [SIDES.get(details.get(key, "").partition("_")[0]) for key in ("kind_src", "kind_dst")]
    if all(sides):
        details["direction"] = "to".join(map(str, sides))
    return {**details, **args} if details else args


def _memory(args: Mapping[str, Any]) -> str:
    """The kinds of memory of a copy, "Pageable -> Device"; "" if they are not told."""
    kinds = [str(args.get(key, "")).replace("_", " ").capitalize() for key in ("kind_src", "kind_dst")]
    return " -> ".join(kinds) if all(kinds) else ""


def _shape(args: Mapping[str, Any], key: str) -> str:
    sizes = args.get(key)
    return " x ".join(map(str, sizes)) if isinstance(sizes, list) else ""


def _amount(args: Mapping[str, Any], key: str, default: int = 0) -> int:
    """A count that fits into a column of 32 bits. Raises TraceError for any other value."""
    value = args.get(key)
    if value is None:
        value = default if abs(default) <= GREATEST else 0
    try:
        number = Decimal(str(value))
        if number.is_finite() and abs(number) <= GREATEST:
            return int(number)
    except InvalidOperation:
        pass
    raise TraceError(f"got {key} = {str(value)[:40]}, expected a number less than {GREATEST + 1}")


def _collective(args: Mapping[str, Any]) -> str:
    return json.dumps({name: args[key] for name, key in COLLECTIVE.items() if key in args}, default=str)


def _microseconds(event: Mapping[str, Any], key: str) -> int | Decimal:
    """A time of an event. TraceError for a time outside of any capture."""
    value = event.get(key)
    try:
        time = value if type(value) is int else Decimal(str(value))
        if -LATEST_US < time < LATEST_US:
            return time
        shown = f"{time:.4g}"
    except InvalidOperation:  # not a number, or NaN
        shown = "none" if key not in event else shown_value(value)
        raise TraceError(f"got {key} = {shown}, expected a time in microseconds") from None
    raise TraceError(f"got a time of {shown} us, expected less than {LATEST_US} us (146 years)")


def _ns(event: Mapping[str, Any], key: str) -> int:
    return round(_microseconds(event, key) * 1000)
