"""NVTX ranges projected onto the GPU: when, and for how long, the work that a range launched ran.

The rows equal nsys's own reports nvtx_gpu_proj_trace (nvtxgpuproj in 2022.4), nvtx_gpu_proj_sum and nvtx_kern_sum: an
operation belongs to every range that contains its API call, on the call's thread. They differ where nsys is wrong:

- nsys finds the range around a range in an R*Tree, whose bounds are 32-bit floats. From 2^24 ns (17 ms) after the start
  of a session on, it takes neighbours for parents, and gets level, parent and number of children wrong.
- nsys takes ranges with the same bounds for each other's parents and loses their level. In labkit each is the child of
  the one before.
- nsys leaves out a start/end range that ended on the thread it began on, if its end names a thread. labkit keeps it.
- The ORDER BY of nsys 2022.4 names no column, so its rows come by the number of the range. labkit sorts by start.

A missing name is "".
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.containment import NONE, Intervals, matches, on_one_line, over_windows, parents, runs, windows
from labkit.nsys.analysis.launches import call_times, launches
from labkit.nsys.arrays import Ints
from labkit.nsys.trace import Trace

LATEST = int(np.iinfo(np.int64).max)


def project(trace: Trace, *, graphs: bool = False) -> pd.DataFrame:
    """One row per range that launched GPU work, by projected start, the longer first.

    - operations: API calls that led to work;
    - level, parent_id (0: none): by the tightest enclosing range;
    - children: ranges with a row, whose tightest enclosing range this is;
    - range: the row in `trace.ranges`. Ids come from the range's own file.

    With `graphs`, CUDA graphs that were traced as a whole count as work, which nsys does not do. A trace without GPU
    work is projected on the CPU: every range on itself, with 0 operations.
    """
    ranges = trace.ranges
    if trace.on_gpu:
        line, first, last, operations = _work_of_ranges(trace, graphs)
    else:
        (line,) = on_one_line([ranges])
        first, last = ranges["start_ns"].to_numpy(), ranges["end_ns"].to_numpy()
        operations = np.zeros(len(ranges), np.int64)
    parent, level = parents(line)
    shown = np.flatnonzero(first < LATEST)
    shown = shown[np.lexsort((first[shown] - last[shown], first[shown]))]
    has_parent = parent[shown] != NONE
    children = np.bincount(parent[shown][has_parent], minlength=len(ranges))
    rows = ranges.iloc[shown]
    start, process, range_id = (rows[name].to_numpy() for name in ("start_ns", "process", "range_id"))
    return pd.DataFrame(
        {
            "name": full_names(rows),
            "start_ns": first[shown],
            "duration_ns": last[shown] - first[shown],
            "range_start_ns": start,
            "range_duration_ns": rows["end_ns"].to_numpy() - start,
            "style": rows["style"].array,
            "process": process,
            "pid": trace.processes["pid"].to_numpy()[process],
            "tid": rows["tid"].to_numpy(),
            "operations": operations[shown],
            "level": level[shown],
            "children": children[shown],
            "range_id": range_id,
            "parent_id": np.where(has_parent, ranges["range_id"].to_numpy()[parent[shown]], 0),
            "range": shown,
        }
    )


def full_names(ranges: pd.DataFrame) -> pd.Categorical:
    """ "domain:message" of each range; the message alone without a domain, "" without a message."""
    domain, name = ranges["domain"].cat, ranges["name"].cat
    pairs = domain.codes.to_numpy(np.int64) * len(name.categories) + name.codes.to_numpy(np.int64)
    used, where = np.unique(pairs, return_inverse=True)
    texts = []
    for pair in used.tolist():
        space, text = domain.categories[pair // len(name.categories)], name.categories[pair % len(name.categories)]
        texts.append(f"{space}:{text}" if space and text else text)
    codes, categories = pd.factorize(np.array(texts, dtype=object))
    return pd.Categorical.from_codes(codes[where], pd.Index(categories, dtype="str"))


def _work_of_ranges(trace: Trace, graphs: bool) -> tuple[Intervals, Ints, Ints, Ints]:
    """The ranges on one line, and for each the first start of its work, the last end, and the number of its calls.

    The work of a range that launched none starts at LATEST.
    """
    operations = trace.operations if graphs else trace.operations[(trace.operations["kind"] != "graph").to_numpy()]
    calls, of_call, of_operation = launches(trace, operations)
    numbers = max(of_call.max(initial=NONE), of_operation.max(initial=NONE)) + 1
    first, last = np.full(numbers, LATEST), np.full(numbers, -LATEST)
    np.minimum.at(first, of_operation, operations["start_ns"].to_numpy())
    np.maximum.at(last, of_operation, operations["end_ns"].to_numpy())

    launching = first[of_call] < LATEST
    line, at = on_one_line([trace.ranges, call_times(trace, calls.index.to_numpy()[launching])])
    number = of_call[launching]
    starts, ends = np.full(len(line), LATEST), np.full(len(line), -LATEST)
    for rows, low, high in windows(line, at):
        np.minimum(starts, over_windows(np.minimum, first[number[rows]], low, high, LATEST), out=starts)
        np.maximum(ends, over_windows(np.maximum, last[number[rows]], low, high, -LATEST), out=ends)
    return line, starts, ends, _distinct(line, at, number)


def _distinct(outer: Intervals, inner: Intervals, label: Ints) -> Ints:
    """The number of different labels among the `inner` intervals that each of `outer` contains."""
    order = np.lexsort((-inner.end, inner.start, label))
    while True:  # an interval around another of the same label adds nothing, so it is dropped
        at, own = inner[order], label[order]
        around = (own[1:] == own[:-1]) & (at.end[1:] <= at.end[:-1])
        if not around.any():
            break
        order = order[~np.append(around, False)]
    again = np.flatnonzero(own[1:] == own[:-1])
    both = Intervals(at.start[again], at.end[again + 1])  # an interval around this has counted a label once too often
    return _count(outer, at) - _count(outer, both)


def _count(outer: Intervals, inner: Intervals) -> Ints:
    """The number of `inner` intervals that each of `outer` contains."""
    return sum((high - low for _, low, high in windows(outer, inner)), np.zeros(len(outer), np.int64))


def projection_summary(trace: Trace, *, graphs: bool = False, among: NDArray[np.bool_] | None = None) -> pd.DataFrame:
    """The rows of `project` that have a name, summed by name and style, the most projected time first.

    `among`: whether each row of `trace.ranges` counts.
    """
    rows = project(trace, graphs=graphs)
    if among is not None:
        rows = rows[among[rows["range"].to_numpy()]]
    groups = rows[(rows["name"] != "").to_numpy()].groupby(["name", "style"], observed=True)
    summary = {
        "total_ns": groups["duration_ns"].sum(),
        "range_total_ns": groups["range_duration_ns"].sum(),
        "instances": groups.size(),
        **spread_of(groups["duration_ns"]),
        "operations": groups["operations"].sum(),
        "avg_operations": groups["operations"].mean(),
        "avg_level": groups["level"].mean(),
        "avg_children": groups["children"].mean(),
    }
    order = ["total_ns", "name", "style"]
    return pd.DataFrame(summary).reset_index().sort_values(order, ascending=[False, True, True], ignore_index=True)


def spread_of(times: pd.api.typing.SeriesGroupBy) -> dict[str, pd.Series]:
    """Mean, median, least, greatest and standard deviation of groups of times, in the order of nsys's columns."""
    return {
        "avg_ns": times.mean(),
        "med_ns": times.median(),
        "min_ns": times.min(),
        "max_ns": times.max(),
        "std_ns": times.std(ddof=1).fillna(0.0),  # 0 for a single range
    }


def kernel_summary(trace: Trace, *, among: NDArray[np.bool_] | None = None) -> pd.DataFrame:
    """Kernels by name and style of the ranges that launched them, and by thread; in that order, the longest first.

    A kernel counts for every range around its API call; its time counts twice for two ranges of one name. Kernels
    outside any range have range "" and style "". Kernels without an API call also have pid and tid -1. `among`: whether
    each row of `trace.operations` counts.
    """
    counts = (trace.operations["kind"] == "kernel").to_numpy()
    kernels = trace.operations[counts if among is None else counts & among]
    calls, of_call, of_kernel = launches(trace, kernels)
    kernel, call = matches(of_kernel, of_call)
    around, within = _pairs(*on_one_line([trace.ranges, call_times(trace, calls.index.to_numpy())]))
    pair, place = matches(call, within)
    kernel, call = kernel[pair], call[pair]
    row = np.append(around, NONE)[place]

    pid = trace.processes["pid"].to_numpy()[calls["process"].to_numpy()]
    pairs = pd.DataFrame(
        {
            "range": _texts_of(full_names(trace.ranges), row),
            "style": _texts_of(trace.ranges["style"].array, row),
            "pid": np.append(pid, NONE)[call],
            "tid": np.append(calls["tid"].to_numpy(), NONE)[call],
            "kernel": kernels["name"].array[kernel],
            "row": row,
            "one": kernel,
            "time": (kernels["end_ns"] - kernels["start_ns"]).to_numpy()[kernel],
        }
    )
    groups = pairs.groupby(["range", "style", "pid", "tid", "kernel"], observed=True)
    summary = {
        "instances": groups["row"].nunique().where(groups["row"].max() != NONE, 0),
        "kernels": groups["one"].nunique(),
        "total_ns": groups["time"].sum(),
        **spread_of(groups["time"]),
    }
    order = ["range", "pid", "tid", "total_ns"]
    table = pd.DataFrame(summary).reset_index().astype({"range": "str", "style": "str", "kernel": "str"})
    return table.sort_values(order, ascending=[True, True, True, False], ignore_index=True)


def _pairs(outer: Intervals, inner: Intervals) -> tuple[Ints, Ints]:
    """Every (row of `outer`, row of `inner`) where the outer interval contains the inner one."""
    pairs = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    for rows, low, high in windows(outer, inner):
        around, place = runs(low, high)
        pairs.append((around, rows[place]))
    return np.concatenate([around for around, _ in pairs]), np.concatenate([within for _, within in pairs])


def _texts_of(texts: pd.Categorical, rows: Ints) -> pd.Categorical:
    """The texts of some rows; "" for the row NONE."""
    texts = texts if "" in texts.categories else texts.add_categories([""])
    codes = np.append(texts.codes, texts.categories.get_loc(""))
    return pd.Categorical.from_codes(codes[rows], texts.categories)
