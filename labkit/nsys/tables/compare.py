"""The difference of two traces' times, split into parts. The traces need no annotation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.containment import NONE, on_one_line, parents
from labkit.nsys.analysis.intervals import fresh_start_ns
from labkit.nsys.analysis.launches import first_calls
from labkit.nsys.analysis.projection import full_names
from labkit.nsys.tables.bare_names import without_numbers
from labkit.nsys.tables.budget import budget
from labkit.nsys.tables.catalogue import DIFFERENCE
from labkit.nsys.tables.gaps import gaps, idle_by_cause
from labkit.nsys.tables.kernel_names import brief
from labkit.nsys.tables.places import range_rows
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.tables.units import Units, units_of
from labkit.nsys.trace import EXPORT_AGAIN, Trace, TraceError
from labkit.system.asked_from import on_command_line, setting

UNEQUAL, UNEQUAL_ALONE = 1.5, 1.02  # ratios of operations that cause a remark: per unit (fusing changes them), without
IDLE, OUTSIDE = "idle: ", "(outside of ranges)"

Place = tuple[str, str]  # the common kernels before and after; "" at an end of the trace


@dataclass(frozen=True)
class TraceDifference:
    """The difference of two traces' times. `ranges` and `kernels` split it in two ways, the largest change first.

    Columns of both:

    - name;
    - a_count, b_count: operations, or gaps;
    - a_ns, b_ns: the time that the part adds. Time in which operations overlap counts for the first to begin;
    - difference_ns: b - a;
    - change: the difference as a share of all of a's time;
    - with `units` also a_unit_ns, b_unit_ns, unit_difference_ns and unit_change: the same for one unit.

    A kernel that only one side has shares a row with the kernels that the other side runs between the same two common
    kernels. The row's name is "this -> that". Both frames have a row "idle: CAUSE" for each cause of idle time.
    """

    ranges: pd.DataFrame  # by the path of the ranges around the launches; empty if the traces share none
    kernels: pd.DataFrame  # by kernel
    a_ns: int  # sum of the column a_ns: the spans of all devices, or the busy time if there are no idle rows
    b_ns: int
    remarks: tuple[str, ...]  # also why there are no idle rows
    units: Units | None = None  # the work that both sides repeat, with its counts; None: unknown

    @property
    def per_unit(self) -> tuple[float, float]:
        """The time of one unit on each side, in nanoseconds; without units all of its time."""
        counts = (self.units.a, self.units.b) if self.units else (1.0, 1.0)
        return self.a_ns / counts[0], self.b_ns / counts[1]

    @property
    def ratio(self) -> float:
        """The time of B over that of A, for one unit if units are known."""
        a, b = self.per_unit
        return b / max(a, 1e-9)


def compare_traces(a: Trace, b: Trace, selection: Selection = EVERYTHING) -> TraceDifference:
    """Splits the difference of `b` and `a` into parts. TraceError where one of them has no GPU operation.

    Units tell how often each side does its work. Without units, `remarks` says that the sides may do different work.
    """
    sides = (a, b)
    for side, letter in zip(sides, "AB", strict=True):
        if not side.on_gpu:
            not_read, where = side.source.not_read, f"in trace {letter} ({', '.join(side.source.files)})"
            if not_read:
                raise TraceError(f"got only {not_read} {where}; {EXPORT_AGAIN}")
            raise TraceError(f"got no GPU operation {where}; `labkit explain` compares annotated traces of CPUs")
    units = units_of(a, b, selection)
    rows = [_rows(side, selection) for side in sides]
    idle, idle_remarks = _idle(sides, selection)
    paths = [frame["path"].where(frame["path"] != "", OUTSIDE) for frame in rows]
    shared = set(paths[0]) & set(paths[1]) - {OUTSIDE}
    kernels = _parts(rows, _kernel_parts(*rows), idle, units)
    return TraceDifference(
        ranges=_parts(rows, paths, idle, units) if shared else kernels.iloc[:0],
        kernels=kernels,
        a_ns=int(kernels["a_ns"].sum()),
        b_ns=int(kernels["b_ns"].sum()),
        remarks=(*idle_remarks, *_remarks(rows[0], rows[1], units)),
        units=units,
    )


def _parts(
    rows: Sequence[pd.DataFrame], names: Sequence[pd.Series], idle: Sequence[pd.DataFrame], units: Units | None
) -> pd.DataFrame:
    sides = [
        pd.concat([operations.groupby(name.to_numpy())["time_ns"].agg(["size", "sum"]), of_idle])
        for operations, name, of_idle in zip(rows, names, idle, strict=True)
    ]
    for side, letter in zip(sides, "ab", strict=True):
        side.columns = pd.Index([f"{letter}_count", f"{letter}_ns"])
    frame = sides[0].join(sides[1], how="outer").fillna(0).astype("int64")
    frame["difference_ns"] = frame["b_ns"] - frame["a_ns"]
    frame["change"] = frame["difference_ns"] / max(int(frame["a_ns"].sum()), 1)
    frame = frame.rename_axis("name").reset_index().astype({"name": "str"})
    frame = frame.iloc[np.argsort(-frame["difference_ns"].abs().to_numpy(), kind="stable")].reset_index(drop=True)
    frame = frame[list(DIFFERENCE)]
    if units is None:
        return frame
    a, b = frame["a_ns"] / units.a, frame["b_ns"] / units.b
    return frame.assign(a_unit_ns=a, b_unit_ns=b, unit_difference_ns=b - a, unit_change=(b - a) / max(a.sum(), 1e-9))


def _rows(trace: Trace, selection: Selection) -> pd.DataFrame:
    """The selected operations in the order of time. Its columns:

    - path: of the ranges around the launch; "" without ranges;
    - kernel;
    - time_ns: the time that the operation adds.
    """
    operations = trace.operations
    selected = selection.of(trace, "operations")
    start, end = (operations[name].to_numpy()[selected] for name in ("start_ns", "end_ns"))
    if selection.window_ns:
        start, end = (np.clip(times, *selection.window_ns) for times in (start, end))
    device = operations.groupby(["process", "device"]).ngroup().to_numpy()[selected]
    fresh = fresh_start_ns(start, np.maximum(start, end), device)
    return pd.DataFrame(
        {
            "path": np.append(_range_paths(trace), "")[range_rows(trace, trace.ranges, first_calls(trace)[selected])],
            "kernel": [brief(str(name)) for name in operations["name"].array[selected]],
            "time_ns": np.maximum(end, start) - fresh,
        }
    )


def _kernel_parts(a: pd.DataFrame, b: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """The part of each operation: its kernel, if both sides have it, else the names of its place on both sides."""
    common = set(a["kernel"]) & set(b["kernel"])
    places = [_places(side["kernel"], common) for side in (a, b)]
    longest = [_longest_kernels(side, of_side) for side, of_side in zip((a, b), places, strict=True)]
    names = {place: " -> ".join(side.get(place, "nothing") for side in longest) for place in {*longest[0], *longest[1]}}
    parts = [
        pd.Series(
            [kernel if place is None else names[place] for kernel, place in zip(side["kernel"], of_side, strict=True)]
        )
        for side, of_side in zip((a, b), places, strict=True)
    ]
    return parts[0], parts[1]


def _longest_kernels(rows: pd.DataFrame, places: list[Place | None]) -> dict[Place, str]:
    """The kernel with the most time at each place, the first by name of equal ones."""
    times: dict[Place, Counter[str]] = {}
    for place, kernel, time_ns in zip(places, rows["kernel"], rows["time_ns"].tolist(), strict=True):
        if place is not None:
            times.setdefault(place, Counter())[kernel] += time_ns
    return {place: min(ns, key=lambda kernel: (-ns[kernel], kernel)) for place, ns in times.items()}


def _range_paths(trace: Trace) -> NDArray[np.object_]:
    """The path of each range, from the outermost range around it: "generate/forward/layer"."""
    bare = without_numbers(full_names(trace.ranges), trace.ranges["process"].to_numpy())
    names = np.asarray(bare.astype(str), object)
    (line,) = on_one_line([trace.ranges])
    parent, level = parents(line)
    paths = np.append(names, "")
    for row in np.argsort(level, kind="stable").tolist():
        if parent[row] != NONE:
            paths[row] = f"{paths[parent[row]]}/{names[row]}"
    return paths[:-1]


def _places(kernels: pd.Series, common: set[str]) -> list[Place | None]:
    """For each kernel that is not common, the common kernels before and after it; None for common kernels."""
    shared = kernels.where(kernels.isin(common))
    before, after = shared.ffill().fillna(""), shared.bfill().fillna("")
    return [
        None if is_shared else (first, second)
        for is_shared, first, second in zip(shared.notna(), before, after, strict=True)
    ]


def _idle(sides: tuple[Trace, Trace], selection: Selection) -> tuple[list[pd.DataFrame], list[str]]:
    """The idle time of each side by cause, as size and sum; empty if it is not known for one side. Also remarks."""
    empty = pd.DataFrame({"size": pd.Series(dtype="int64"), "sum": pd.Series(dtype="int64")})
    if any(budget(side, selection)["idle_ns"].isna().any() for side in sides):
        reason = "where CUDA graphs lack their kernels, or work of the GPU is not read: busy time is compared"
        return [empty, empty], [f"idle time is not known {reason}"]
    if selection.name is not None or selection.range is not None:
        return [empty, empty], ["busy time of the chosen operations is compared, without the idle time between them"]
    by_side = []
    for side in sides:
        causes = idle_by_cause(gaps(side, selection)).groupby("cause")[["gaps", "time_ns"]].sum()
        causes.index = IDLE + causes.index.astype("str")
        by_side.append(causes.rename(columns={"gaps": "size", "time_ns": "sum"}))
    return by_side, []


def _remarks(a: pd.DataFrame, b: pd.DataFrame, units: Units | None) -> list[str]:
    remarks = []
    per_unit = [len(a), len(b)] if units is None else [len(a) / units.a, len(b) / units.b]
    if units is not None and units.differ:
        remarks.append(f"A has {units.a:,.4g} and B {units.b:,.4g} of {units.name!r}: compare them by one")
    choose = setting("window", "range") if on_command_line() else "window_ns or range of a Selection"
    if max(per_unit) > (UNEQUAL_ALONE if units is None else UNEQUAL) * max(min(per_unit), 1e-9):
        remarks.append(
            f"{len(a):,} and {len(b):,} operations"
            + ("" if units else ", and no range of both that started them tells how often each did its work")
            + f": do both do the same work? {choose} choose a part"
        )
    return remarks
