"""The strips of a timeline: the events of each thread and stream, in rows without overlap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.attribution import Attribution
from labkit.nsys.analysis.containment import numbered
from labkit.nsys.analysis.nesting import levels
from labkit.nsys.arrays import Ints
from labkit.nsys.timeline.shades import Codes, shades
from labkit.nsys.trace import Trace

FRAMES = ("ranges", "calls", "operations")
RANGES, OPS, API, OS, GPU = "ranges", "ops", "api", "os", "gpu"  # kinds of strips
OF_A_THREAD = (RANGES, OPS, API, OS)
OF_CALLS = {"op": OPS, "api": API, "os": OS}  # by the kind of the call
TITLES = {OPS: "operators", API: "CUDA calls", OS: "system calls"}
MAX_LEVELS = 32  # of one strip; events that are nested deeper are left out, and counted


@dataclass(frozen=True)
class Strip:
    """The events of one kind of a thread or stream, with a lane for each level of nesting."""

    trace: int
    process: int
    kind: str
    label: str  # of its thread or stream: "MainThread (4000)", "GPU 0, stream 7"
    title: str  # next to its lanes: the label, or the kind of calls below another strip of the thread
    first: int  # lane
    lanes: int  # their number


@dataclass(frozen=True)
class StripEvents:
    """The events of one frame of a trace, in its order and on its clock, with their levels and lanes."""

    frame: int  # position in FRAMES
    start: Ints
    end: Ints
    level: NDArray[np.int32]
    lane: Ints
    shade: Codes
    names: pd.Categorical


def strips_of(
    at: int, trace: Trace, attribution: Attribution | None, first: int
) -> tuple[list[Strip], list[StripEvents]]:
    """The strips of trace number `at`, and its events with the shades of their stages. Its first lane is `first`."""
    threads, of_range, of_call = _threads(trace)
    streams, of_operation = _streams(trace)
    kinds = len(OF_A_THREAD)
    called = trace.calls["kind"].cat
    kind_of_call = np.array([OF_A_THREAD.index(OF_CALLS.get(kind, API)) for kind in called.categories], np.int64)
    of_events = (
        kinds * of_range + OF_A_THREAD.index(RANGES),
        kinds * of_call + kind_of_call[called.codes],
        kinds * len(threads) + of_operation,
    )
    frames = [getattr(trace, name) for name in FRAMES]
    times = [(frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()) for frame in frames]
    times = [(start, np.maximum(start, end)) for start, end in times]
    heights = [levels(start, end, strip) for (start, end), strip in zip(times, of_events, strict=True)]

    lanes = np.zeros(kinds * len(threads) + len(streams), np.int64)
    for strip, level in zip(of_events, heights, strict=True):
        np.maximum.at(lanes, strip, np.minimum(level + 1, MAX_LEVELS))
    process = np.concatenate([np.repeat(threads["process"], kinds), streams["process"]])
    shown = np.lexsort((np.arange(len(lanes)), process))  # by process: its threads, then its streams
    begins = np.zeros(len(lanes), np.int64)
    begins[shown] = first + np.cumsum(lanes[shown]) - lanes[shown]

    labels = [*np.repeat(threads["label"], kinds), *streams["label"]]
    of_kind = [*OF_A_THREAD * len(threads), *[GPU] * len(streams)]
    strips: list[Strip] = []
    for number in shown[lanes[shown] > 0]:
        kind, label = of_kind[number], labels[number]
        thread = (int(process[number]), label)
        follows = bool(strips) and (strips[-1].process, strips[-1].label) == thread
        title = label if kind not in TITLES else TITLES[kind] if follows else f"{label}: {TITLES[kind]}"
        strips.append(Strip(at, thread[0], kind, label, title, int(begins[number]), int(lanes[number])))
    colours = shades(trace, (of_range, of_call), attribution)
    return strips, [
        StripEvents(
            number,
            *times[number],
            heights[number],
            begins[of_events[number]] + heights[number],
            colours[number],
            frame["name"].array,
        )
        for number, frame in enumerate(frames)
    ]


def _threads(trace: Trace) -> tuple[pd.DataFrame, Ints, Ints]:
    """The threads with ranges or calls, the most ranges of a process first, and the thread of each row."""
    of_range, of_call = numbered([trace.ranges, trace.calls], "tid")
    code = np.concatenate([of_range, of_call])
    both = pd.concat([trace.ranges[["process", "tid"]], trace.calls[["process", "tid"]]], ignore_index=True)
    threads = both.iloc[np.unique(code, return_index=True)[1]].reset_index(drop=True)
    ranges = np.bincount(of_range, minlength=len(threads))
    names = {(process, tid): name for process, tid, name in trace.threads.itertuples(index=False)}
    pairs = zip(threads["process"], threads["tid"], strict=True)
    threads["label"] = [_thread(str(names.get((process, tid)) or "thread"), tid) for process, tid in pairs]
    order = np.lexsort((threads["tid"], -ranges, threads["process"]))
    place = np.argsort(order)
    return threads.iloc[order].reset_index(drop=True), place[of_range], place[of_call]


def _thread(name: str, tid: int) -> str:
    return name if str(tid) in name else f"{name} ({tid})"


def _streams(trace: Trace) -> tuple[pd.DataFrame, Ints]:
    """The streams with operations, and the stream of each operation."""
    columns = ["process", "device", "stream"]
    grouped = trace.operations.groupby(columns, sort=True)
    streams = grouped.size().index.to_frame(index=False)
    labels = zip(streams["device"], streams["stream"], strict=True)
    streams["label"] = [f"GPU {device}, stream {stream}" for device, stream in labels]
    return streams, grouped.ngroup().to_numpy(np.int64)
