"""When a device did nothing, and what it waited for: the host, a launch, or something that no trace shows.

A gap lies between two times at which anything ran on a device. It is told by the call that launched the operation
which ends it: until that call began, the device waited for the host (HOST_CAUSES say for what of it); while the call
ran, for the launch; and from its end on, for the launch to arrive. Where the call had returned before the gap began,
the operation was queued, and the device took its time to go on, or waited for an event of another stream or device,
which traces do not show.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.containment import NONE, numbered, on_one_line, runs, tightest
from labkit.nsys.analysis.intervals import Union
from labkit.nsys.analysis.launches import first_calls
from labkit.nsys.analysis.projection import full_names
from labkit.nsys.arrays import Ints
from labkit.nsys.tables.budget import span
from labkit.nsys.tables.places import devices
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.tables.work_kinds import graph_launches
from labkit.nsys.trace import Trace, TraceError

SYNCHRONISES = re.compile(r"Synchronize|Memcpy(?!.*Async)")
ALLOCATES = re.compile(r"Malloc|Free|Alloc|HostRegister|MemCreate|MemMap")
SYNCHRONISED, ALLOCATED, CALLED, HOST = "synchronisation", "allocation", "other CUDA calls", "host code"
HOST_CAUSES = (SYNCHRONISED, ALLOCATED, CALLED, HOST)
LAUNCHING, LATENCY, QUEUED, UNKNOWN = "launch call", "launch latency", "between queued", "launch not recorded"
CAUSES = (*HOST_CAUSES, LAUNCHING, LATENCY, QUEUED, UNKNOWN)
SHORT_NS = 10_000
COLUMNS = (
    *("rank", "device", "start_ns", "time_ns", "cause", "awaited", "host_cause", "host_ns", "launch_ns", "latency_ns"),
    *("queued_ns", "unknown_ns", "before", "next", "stream", "row"),
)


def gaps(trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    """One row per gap, the longest first. Its columns:

    - rank, device, start_ns, time_ns; before, next: the operations around it; stream, row: of `next`, and its
      row in `trace.operations`;
    - host_ns, launch_ns, latency_ns, queued_ns, unknown_ns: its parts before, during and after the launch of `next`,
      all of it where `next` was queued before, and where its launch was not recorded; they add up to time_ns;
    - host_cause: what the launching thread did in host_ns (one of HOST_CAUSES): waited for the GPU if it was in a
      call that does so when the gap began, else what took most of the time; "" without host_ns;
    - cause: the cause of the longest part; awaited: the call, operator or range that it names.

    Of a selection's names that of `next` counts; with streams, the gaps are those of these streams alone. TraceError
    where no gap can be told: without operations, or because CUDA graphs lack their kernels.
    """
    narrow = Selection(selection.window_ns, None, selection.ranks, selection.devices, selection.streams)
    if not trace.on_gpu:
        raise TraceError("got a trace without GPU operations, in which no gaps between them can be told")
    asked = narrow.of(trace, "operations")
    launches = graph_launches(trace)
    blind = set(launches.loc[~launches["seen"], "process"])
    places = [place for place in devices(trace).itertuples(index=False) if place.process not in blind]
    if not places:
        raise TraceError(
            f"got {int((~launches['seen']).sum())} launches of CUDA graphs without any of their kernels, so nobody can "
            "tell when the GPU was idle; record again with the graphs' nodes (nsys: --cuda-graph-trace=node)"
        )
    found = [_between(trace, place, asked, narrow) for place in places]
    frame = pd.concat([*found], ignore_index=True)
    frame = frame[(frame["time_ns"] > 0).to_numpy()].reset_index(drop=True)
    if selection.name is not None or selection.range is not None:
        ends = Selection(name=selection.name, range=selection.range).of(trace, "operations")
        frame = frame[ends[frame["next_row"].to_numpy()]].reset_index(drop=True)
    frame = _explained(trace, frame)
    return frame[list(COLUMNS)].sort_values(["time_ns", "start_ns"], ascending=[False, True], ignore_index=True)


def idle_by_cause(found: pd.DataFrame) -> pd.DataFrame:
    """What the gaps of `gaps` waited for, by rank, device and cause: gaps, time_ns (the parts of that cause), share
    (of the idle time of the device). A gap counts for each cause that it has a part of.
    """
    host = found["host_cause"].where(found["host_ns"] > 0, "")
    parts = [
        *((cause, found["host_ns"].where(host == cause, 0)) for cause in HOST_CAUSES),
        (LAUNCHING, found["launch_ns"]),
        (LATENCY, found["latency_ns"]),
        (QUEUED, found["queued_ns"]),
        (UNKNOWN, found["unknown_ns"]),
    ]
    rows = [
        pd.DataFrame({"rank": found["rank"], "device": found["device"], "cause": cause, "time_ns": time})[time > 0]
        for cause, time in parts
    ]
    groups = pd.concat(rows).groupby(["rank", "device", "cause"])["time_ns"]
    table = groups.agg(["count", "sum"]).reset_index().rename(columns={"count": "gaps", "sum": "time_ns"})
    table["share"] = table["time_ns"] / table.groupby(["rank", "device"])["time_ns"].transform("sum")
    return table.sort_values(["rank", "device", "time_ns"], ascending=[True, True, False], ignore_index=True)


def _between(trace: Trace, place: object, asked: NDArray[np.bool_], selection: Selection) -> pd.DataFrame:
    """The gaps of a device with the rows of the operations around each."""
    operations = trace.operations
    process, device, rank = (getattr(place, name) for name in ("process", "device", "rank"))
    here = ((operations["process"] == process) & (operations["device"] == device)).to_numpy()
    if selection.streams:
        here &= np.isin(operations["stream"].to_numpy(), selection.streams)
    mine = np.flatnonzero(here)
    columns = ["rank", "device", "start_ns", "time_ns", "before_row", "next_row"]
    if not (here & asked).any():
        return pd.DataFrame({name: np.zeros(0, np.int64) for name in columns})
    opens, closes = span(trace, here, np.flatnonzero(here & asked), selection)
    start, end = (operations[name].to_numpy()[mine] for name in ("start_ns", "end_ns"))
    end = np.maximum(start, end)
    union = Union.of(start, end)
    last = mine[np.argsort(end, kind="stable")[np.searchsorted(np.sort(end), union.end_ns[:-1])]]
    following = mine[np.searchsorted(start, union.start_ns[1:])]
    begins = np.clip(union.end_ns[:-1], opens, closes)
    values = (rank, device, begins, np.clip(union.start_ns[1:], opens, closes) - begins, last, following)
    return pd.DataFrame(dict(zip(columns, values, strict=True)))


def _explained(trace: Trace, frame: pd.DataFrame) -> pd.DataFrame:
    operations, calls = trace.operations, trace.calls
    begins = frame["start_ns"].to_numpy()
    ends = begins + frame["time_ns"].to_numpy()
    call = first_calls(trace)[frame["next_row"].to_numpy()] if len(frame) else np.zeros(0, np.int64)
    known = call != NONE
    called, returned = (np.append(calls[name].to_numpy(), 0)[call] for name in ("start_ns", "end_ns"))
    launch_from, late_from = np.clip(called, begins, ends), np.clip(returned, begins, ends)
    parts = {
        "host_ns": np.where(known, launch_from - begins, 0),
        "launch_ns": np.where(known, late_from - launch_from, 0),
        "latency_ns": np.where(known & (returned > begins), ends - late_from, 0),
        "queued_ns": np.where(known & (returned <= begins), ends - late_from, 0),
        "unknown_ns": np.where(known, 0, ends - begins),
    }
    frame = frame.assign(**parts)
    cause, awaited = _host_causes(trace, begins, np.where(known, launch_from, begins), call)
    most = np.argmax(np.stack([parts[name] for name in parts]), axis=0) if len(frame) else np.zeros(0, np.int64)
    names = np.append(np.asarray(calls["name"].astype(str), object), "")
    following = np.asarray(operations["name"].astype(str), object)
    of_parts = [cause, *(np.full(len(frame), each, object) for each in (LAUNCHING, LATENCY, QUEUED, UNKNOWN))]
    return frame.assign(
        host_cause=cause,
        cause=np.choose(most, of_parts),
        awaited=np.choose(most, [awaited, *[names[call]] * 3, np.full(len(frame), "", object)]),
        before=following[frame["before_row"].to_numpy()],
        next=following[frame["next_row"].to_numpy()],
        stream=operations["stream"].to_numpy()[frame["next_row"].to_numpy()],
        row=frame["next_row"],
    )


def _host_causes(trace: Trace, begins: Ints, until: Ints, call: Ints) -> tuple[NDArray, NDArray]:
    """For each gap what the thread of its launch did from the gap's begin to the launch, and in which call or range."""
    cause, awaited = np.full(len(begins), "", object), np.full(len(begins), "", object)
    held = np.flatnonzero(until > begins)
    if not len(held):
        return cause, awaited
    cause[held], awaited[held] = HOST, _around(trace, begins[held], until[held], call[held])
    gap, row, overlap = _overlaps(trace, begins, until, call, held)
    names = trace.calls["name"].cat
    codes = names.codes.to_numpy()[row]
    kind = np.array([_kind(str(name)) for name in names.categories], np.int64)[codes]
    start, end = (trace.calls[name].to_numpy()[row] for name in ("start_ns", "end_ns"))
    waits = (kind == 0) & (start <= begins[gap]) & (end >= begins[gap])
    spent = np.zeros((len(begins), 4), np.int64)
    np.add.at(spent, (gap, kind), overlap)
    spent[:, 3] = until - begins - spent[:, :3].sum(axis=1)
    most = spent.argmax(axis=1)
    most[gap[waits]] = 0
    cause[held] = np.array(HOST_CAUSES, object)[most[held]]
    order = np.lexsort((overlap, waits))  # the longest last, and those in which the thread waited after all others
    gap, row, kind = gap[order], row[order], kind[order]
    fits = kind == most[gap]
    longest = np.full(len(begins), NONE)
    longest[gap[fits]] = row[fits]
    told = longest != NONE
    awaited[told] = np.asarray(trace.calls["name"].astype(str), object)[longest[told]]
    return cause, awaited


def _kind(name: str) -> int:
    return 0 if SYNCHRONISES.search(name) else 1 if ALLOCATES.search(name) else 2


def _overlaps(trace: Trace, begins: Ints, until: Ints, call: Ints, held: Ints) -> tuple[Ints, Ints, Ints]:
    """All (gap, row of an API call of its thread that runs in it, for how long): outermost calls only."""
    api = np.flatnonzero((trace.calls["kind"] == "api").to_numpy())
    rows = trace.calls.iloc[api]
    of_call, of_launch = numbered([rows, trace.calls.iloc[call[held]]], "tid")
    order = np.lexsort((rows["start_ns"].to_numpy(), of_call))
    start, end, thread = (each[order] for each in (rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy(), of_call))
    reach = int(max(end.max(initial=0), until.max(initial=0))) + 1
    key = thread * reach
    outer = np.ones(len(order), bool)
    outer[1:] = (key + end)[1:] > np.maximum.accumulate(key + end)[:-1]
    start, end, key, order = start[outer], end[outer], key[outer], order[outer]
    low = np.searchsorted(key + end, of_launch * reach + begins[held], side="left")
    high = np.searchsorted(key + start, of_launch * reach + until[held], side="left")
    which, place = runs(low, np.maximum(high, low))
    gap = held[which]
    overlap = np.minimum(end[place], until[gap]) - np.maximum(start[place], begins[gap])
    return gap, api[order[place]], np.maximum(overlap, 0)


def _around(trace: Trace, begins: Ints, until: Ints, call: Ints) -> NDArray:
    """The innermost range or operator of the launching thread around each stretch of time; "" where there is none."""
    operators = trace.calls[(trace.calls["kind"] == "op").to_numpy()]
    columns = ["start_ns", "end_ns", "process", "tid"]
    named = pd.concat([trace.ranges[columns], operators[columns]], ignore_index=True)
    stretches = trace.calls[["process", "tid"]].iloc[call].assign(start_ns=begins, end_ns=until)
    row = tightest(*on_one_line([named, stretches]))
    texts = [np.asarray(each.astype(str), object) for each in (full_names(trace.ranges), operators["name"])]
    return np.concatenate([*texts, np.array([""], object)])[row]


def short_kernels(trace: Trace, selection: Selection = EVERYTHING, below_ns: int = SHORT_NS) -> pd.DataFrame:
    """Kernels that are shorter than `below_ns` in the median, by name, those first of which most could be saved:

    name, count, total_ns, median_ns, idle_ns (of the device, directly before them) and share (of the device's idle
    time). Fusing them, or one launch for many of them, as CUDA graphs have it, saves idle_ns at the most.
    """
    found = gaps(trace, selection)
    asked = selection.of(trace, "operations", among=(trace.operations["kind"] == "kernel").to_numpy())
    rows = trace.operations[asked]
    idle = found.set_index("row")["time_ns"].reindex(rows.index, fill_value=0)
    rows = rows.assign(time_ns=rows["end_ns"] - rows["start_ns"], idle_ns=idle)
    table = rows.groupby("name", observed=True).agg(
        count=("time_ns", "size"),
        total_ns=("time_ns", "sum"),
        median_ns=("time_ns", "median"),
        idle_ns=("idle_ns", "sum"),
    )
    table = table[table["median_ns"] < below_ns].reset_index().astype({"name": "str"})
    table["share"] = table["idle_ns"] / max(int(found["time_ns"].sum()), 1)
    return table.sort_values("idle_ns", ascending=False, ignore_index=True)
