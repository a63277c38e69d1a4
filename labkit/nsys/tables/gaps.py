"""Gaps in which a device was idle, and their causes: the host, a launch, or something that no trace shows.

A gap is the time between two busy times of a device. Its cause follows from the call that launched the operation after
the gap. Until this call began, the device waited for the host (HOST_CAUSES say for which part of it); while the call
ran, for the launch; and after its end, for the launch to arrive. If the call had returned before the gap began, the
operation was queued. The device was then slow to start it, or waited for an event of another stream or device, which
traces do not show.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.containment import NONE
from labkit.nsys.analysis.intervals import Union
from labkit.nsys.analysis.launches import first_calls
from labkit.nsys.analysis.projection import full_names
from labkit.nsys.tables.budget import span
from labkit.nsys.tables.catalogue import GAPS
from labkit.nsys.tables.host_causes import HOST_CAUSES, Texts, host_causes
from labkit.nsys.tables.places import devices, on_device
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.tables.work_kinds import graph_launches
from labkit.nsys.trace import EXPORT_AGAIN, Trace, TraceError

LAUNCHING, LATENCY, QUEUED, UNKNOWN = "launch call", "launch latency", "between queued", "launch not known"
CAUSES = (*HOST_CAUSES, LAUNCHING, LATENCY, QUEUED, UNKNOWN)
SHORT_NS = 10_000


def gaps(trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    """One row per gap, the longest first. Its columns:

    - rank, device, start_ns, time_ns;
    - before, next: the operations around it;
    - stream, row: of `next`; the row is in `trace.operations`;
    - host_ns, launch_ns, latency_ns: its parts before, during and after the call that launched `next`;
    - queued_ns: all of a gap whose `next` was queued before it;
    - unknown_ns: all of a gap whose `next` has no recorded launch. These five parts add up to time_ns;
    - host_cause: the launching thread's activity in host_ns, one of HOST_CAUSES; <NA> without host_ns;
    - cause: the cause of the longest part;
    - awaited: the call, operator or range that names this cause.

    A selection's name or range applies to `next`. With streams, only these streams make a gap. TraceError where gaps
    are unknown: without operations, or because CUDA graphs lack their kernels.
    """
    narrow = replace(selection, name=None, range=None)
    if not_read := trace.source.not_read:
        raise TraceError(f"got {not_read}, so it is not known when the GPU was idle; {EXPORT_AGAIN}")
    if not trace.on_gpu:
        raise TraceError("got a trace without GPU operations, so it has no gaps between them")
    selected = narrow.of(trace, "operations")
    launches = graph_launches(trace)
    incomplete = set(launches.loc[~launches["seen"], "process"])
    places = [place for place in devices(trace).itertuples(index=False) if place.process not in incomplete]
    if not places:
        raise TraceError(
            f"got {int((~launches['seen']).sum())} launches of CUDA graphs without any of their kernels, so it is "
            "not known when the GPU was idle; record again with the graphs' nodes (nsys: --cuda-graph-trace=node)"
        )
    parts = [_between(trace, place, selected, narrow) for place in places]
    frame = pd.concat(parts, ignore_index=True)
    frame = frame[(frame["time_ns"] > 0).to_numpy()].reset_index(drop=True)
    if selection.name is not None or selection.range is not None:
        ends = Selection(name=selection.name, range=selection.range).of(trace, "operations")
        frame = frame[ends[frame["next_row"].to_numpy()]].reset_index(drop=True)
    frame = _explained(trace, frame)
    return frame[list(GAPS.columns)].sort_values(["time_ns", "start_ns"], ascending=[False, True], ignore_index=True)


def idle_by_cause(all_gaps: pd.DataFrame) -> pd.DataFrame:
    """The idle time in `all_gaps`, the frame of `gaps`, by rank, device and cause.

    Its columns: gaps, time_ns (the parts of this cause), share (of the device's idle time). A gap counts for each cause
    of its parts.
    """
    parts = [
        *((cause, all_gaps["host_ns"].where(all_gaps["host_cause"] == cause, 0)) for cause in HOST_CAUSES),
        (LAUNCHING, all_gaps["launch_ns"]),
        (LATENCY, all_gaps["latency_ns"]),
        (QUEUED, all_gaps["queued_ns"]),
        (UNKNOWN, all_gaps["unknown_ns"]),
    ]
    rows = [
        pd.DataFrame({"rank": all_gaps["rank"], "device": all_gaps["device"], "cause": cause, "time_ns": time})[
            time > 0
        ]
        for cause, time in parts
    ]
    groups = pd.concat(rows).groupby(["rank", "device", "cause"])["time_ns"]
    table = groups.agg(["count", "sum"]).reset_index().rename(columns={"count": "gaps", "sum": "time_ns"})
    table["share"] = table["time_ns"] / table.groupby(["rank", "device"])["time_ns"].transform("sum")
    return table.sort_values(["rank", "device", "time_ns"], ascending=[True, True, False], ignore_index=True)


def _between(trace: Trace, place: Any, selected: NDArray[np.bool_], selection: Selection) -> pd.DataFrame:
    """The gaps of a device, a row of `devices`, with the rows of the operations around each gap."""
    operations = trace.operations
    ran_here = on_device(operations, place.process, place.device)
    if selection.streams:
        ran_here &= np.isin(operations["stream"].to_numpy(), selection.streams)
    rows = np.flatnonzero(ran_here)
    columns = ["rank", "device", "start_ns", "time_ns", "before_row", "next_row"]
    if not (ran_here & selected).any():
        return pd.DataFrame({name: np.zeros(0, np.int64) for name in columns})
    opens, closes = span(trace, ran_here, np.flatnonzero(ran_here & selected), selection)
    start, end = (operations[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
    end = np.maximum(start, end)
    union = Union.of(start, end)
    last = rows[np.argsort(end, kind="stable")[np.searchsorted(np.sort(end), union.end_ns[:-1])]]
    following = rows[np.searchsorted(start, union.start_ns[1:])]
    begins = np.clip(union.end_ns[:-1], opens, closes)
    values = (place.rank, place.device, begins, np.clip(union.start_ns[1:], opens, closes) - begins, last, following)
    return pd.DataFrame(dict(zip(columns, values, strict=True)))


def _explained(trace: Trace, frame: pd.DataFrame) -> pd.DataFrame:
    operations, calls = trace.operations, trace.calls
    begins, following = frame["start_ns"].to_numpy(), frame["next_row"].to_numpy()
    ends = begins + frame["time_ns"].to_numpy()
    call = first_calls(trace)[following]
    recorded = call != NONE
    called, returned = (np.append(calls[name].to_numpy(), 0)[call] for name in ("start_ns", "end_ns"))
    launch_from, latency_from = np.clip(called, begins, ends), np.clip(returned, begins, ends)
    parts = {
        "host_ns": np.where(recorded, launch_from - begins, 0),
        "launch_ns": np.where(recorded, latency_from - launch_from, 0),
        "latency_ns": np.where(recorded & (returned > begins), ends - latency_from, 0),
        "queued_ns": np.where(recorded & (returned <= begins), ends - latency_from, 0),
        "unknown_ns": np.where(recorded, 0, ends - begins),
    }
    most = np.argmax(np.stack(list(parts.values())), axis=0) if len(frame) else np.zeros(0, np.int64)
    host = host_causes(trace, begins, np.where(recorded, launch_from, begins), call)
    others = len(HOST_CAUSES) + most - 1  # in CAUSES
    texts = Texts(calls["name"].cat.categories, full_names(trace.ranges).categories)
    launched = np.append(calls["name"].cat.codes, NONE)[call]
    awaited = np.where(most == 0, texts.codes(host.of_calls, host.call, host.range), texts.codes(True, launched, NONE))
    names = operations["name"].array
    return frame.assign(
        **parts,
        host_cause=pd.Categorical.from_codes(np.where(parts["host_ns"] > 0, host.cause, NONE), list(HOST_CAUSES)),
        cause=pd.Categorical.from_codes(np.where(most == 0, host.cause, others), list(CAUSES)),
        awaited=texts.categorical(awaited),
        before=names[frame["before_row"].to_numpy()],
        next=names[following],
        stream=operations["stream"].to_numpy()[following],
        row=following,
    )


def short_kernels(trace: Trace, selection: Selection = EVERYTHING, below_ns: int = SHORT_NS) -> pd.DataFrame:
    """Kernels by name whose median is shorter than `below_ns`, the largest possible saving first.

    Its columns: name, count, total_ns, median_ns, idle_ns (of the device, directly before them), share (of the device's
    idle time). Fusing these kernels, or launching many of them at once as a CUDA graph does, saves at most idle_ns.
    """
    all_gaps = gaps(trace, selection)
    rows = selection.rows(trace, "operations", "kernel")
    idle = all_gaps.set_index("row")["time_ns"].reindex(rows.index, fill_value=0)
    rows = rows.assign(time_ns=rows["end_ns"] - rows["start_ns"], idle_ns=idle)
    table = rows.groupby("name", observed=True).agg(
        count=("time_ns", "size"),
        total_ns=("time_ns", "sum"),
        median_ns=("time_ns", "median"),
        idle_ns=("idle_ns", "sum"),
    )
    table = table[table["median_ns"] < below_ns].reset_index().astype({"name": "str"})
    table["share"] = table["idle_ns"] / max(int(all_gaps["time_ns"].sum()), 1)
    return table.sort_values("idle_ns", ascending=False, ignore_index=True)
