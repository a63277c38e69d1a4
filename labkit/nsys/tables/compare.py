"""Two traces side by side, whatever they are annotated with: which parts the difference of their time consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from labkit.nsys.analysis.intervals import fresh_start_ns
from labkit.nsys.tables.budget import budget
from labkit.nsys.tables.gaps import gaps, idle_by_cause
from labkit.nsys.tables.kernel_names import brief
from labkit.nsys.tables.paths import operation_paths
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.tables.units import Units, units_of
from labkit.nsys.trace import Trace, TraceError
from labkit.system.asked_from import on_command_line, setting

UNEQUAL, UNEQUAL_ALONE = 1.5, 1.02  # of operations: fusing changes their number, but not without units to go by
IDLE, OUTSIDE = "idle: ", "(outside of ranges)"


@dataclass(frozen=True)
class TraceDifference:
    """`ranges` and `kernels`: the parts of the same difference, those that changed most first. Their columns:

    name, a_count, b_count (operations, or gaps), a_ns, b_ns (time that the part adds: where operations overlap, it
    counts for the one that began first), difference_ns (b - a), change (that, as a share of all of a's time).

    `ranges`: by the path of the ranges around the launches; empty where the traces share none. `kernels`: by kernel;
    those that only one side has stand beside those of the other side that run between the same two common ones, under
    the name "this -> that". Both have a row "idle: CAUSE" for each cause of idle time. In both the columns a_ns and
    b_ns add up to `a_ns` and `b_ns`: the spans of all devices, or without idle rows (`remarks` says why) the busy time.

    `units`: what both sides do again and again, and how often each does (None: nothing tells). Then the parts have the
    columns a_unit_ns, b_unit_ns, unit_difference_ns and unit_change, too: the same for one unit.
    """

    ranges: pd.DataFrame
    kernels: pd.DataFrame
    a_ns: int
    b_ns: int
    remarks: tuple[str, ...]
    units: Units | None = None

    @property
    def per_unit(self) -> tuple[float, float]:
        """The time of one unit on each side, in nanoseconds; without units all of it."""
        counts = (self.units.a, self.units.b) if self.units else (1.0, 1.0)
        return self.a_ns / counts[0], self.b_ns / counts[1]

    @property
    def ratio(self) -> float:
        """How long B takes, in parts of A: for one unit, where units are known."""
        a, b = self.per_unit
        return b / max(a, 1e-9)


def compare_traces(a: Trace, b: Trace, selection: Selection = EVERYTHING) -> TraceDifference:
    """What makes `b` take longer or shorter than `a`. TraceError where one of them has no GPU operation.

    Units tell how often each side does its work. Without units, `remarks` says that the sides may not do the same.
    """
    sides = (a, b)
    for side, letter in zip(sides, "AB", strict=True):
        if not side.on_gpu:
            raise TraceError(
                f"got no GPU operation in trace {letter} ({', '.join(side.source.files)}); `labkit explain` compares "
                "annotated traces of CPUs"
            )
    units = units_of(a, b, selection)
    rows = [_rows(side, selection) for side in sides]
    idle, told = _idle(sides, selection)
    paths = [each["path"].where(each["path"] != "", OUTSIDE) for each in rows]
    shared = set(paths[0]) & set(paths[1]) - {OUTSIDE}
    kernels = _parts(rows, _kernel_parts(*rows), idle, units)
    return TraceDifference(
        ranges=_parts(rows, paths, idle, units) if shared else kernels.iloc[:0],
        kernels=kernels,
        a_ns=int(kernels["a_ns"].sum()),
        b_ns=int(kernels["b_ns"].sum()),
        remarks=(*told, *_remarks(rows[0], rows[1], units)),
        units=units,
    )


def _parts(
    rows: Sequence[pd.DataFrame], names: Sequence[pd.Series], idle: Sequence[pd.DataFrame], units: Units | None
) -> pd.DataFrame:
    sides = [
        pd.concat([each.groupby(name.to_numpy())["time_ns"].agg(["size", "sum"]), of_idle])
        for each, name, of_idle in zip(rows, names, idle, strict=True)
    ]
    for side, letter in zip(sides, "ab", strict=True):
        side.columns = pd.Index([f"{letter}_count", f"{letter}_ns"])
    frame = sides[0].join(sides[1], how="outer").fillna(0).astype("int64")
    frame["difference_ns"] = frame["b_ns"] - frame["a_ns"]
    frame["change"] = frame["difference_ns"] / max(int(frame["a_ns"].sum()), 1)
    frame = frame.rename_axis("name").reset_index().astype({"name": "str"})
    frame = frame.iloc[np.argsort(-frame["difference_ns"].abs().to_numpy(), kind="stable")].reset_index(drop=True)
    frame = frame[["name", "a_count", "b_count", "a_ns", "b_ns", "difference_ns", "change"]]
    if units is None:
        return frame
    a, b = frame["a_ns"] / units.a, frame["b_ns"] / units.b
    return frame.assign(a_unit_ns=a, b_unit_ns=b, unit_difference_ns=b - a, unit_change=(b - a) / max(a.sum(), 1e-9))


def _rows(trace: Trace, selection: Selection) -> pd.DataFrame:
    """The operations that are asked about, in the order of time: path, kernel, time_ns (what each adds)."""
    operations = trace.operations
    asked = selection.of(trace, "operations")
    start, end = (operations[name].to_numpy()[asked] for name in ("start_ns", "end_ns"))
    if selection.window_ns:
        start, end = (np.clip(each, *selection.window_ns) for each in (start, end))
    device = operations.groupby(["process", "device"]).ngroup().to_numpy()[asked]
    fresh = fresh_start_ns(start, np.maximum(start, end), device)
    return pd.DataFrame(
        {
            "path": operation_paths(trace)[asked],
            "kernel": [brief(str(name)) for name in operations["name"].array[asked]],
            "time_ns": np.maximum(end, start) - fresh,
        }
    )


def _kernel_parts(a: pd.DataFrame, b: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """The part of each operation: its kernel, if both sides have it, else what stands in its place on both sides."""
    common = set(a["kernel"]) & set(b["kernel"])
    places = [_places(side["kernel"], common) for side in (a, b)]
    names = {}
    for place in set(places[0]) | set(places[1]) - {None}:
        here = []
        for side, of_side in zip((a, b), places, strict=True):
            times = side["time_ns"][[each == place for each in of_side]].groupby(side["kernel"]).sum()
            here.append(str(times.idxmax()) if len(times) else "nothing")
        names[place] = " -> ".join(here)
    made = [
        pd.Series(
            [kernel if place is None else names[place] for kernel, place in zip(side["kernel"], of_side, strict=True)]
        )
        for side, of_side in zip((a, b), places, strict=True)
    ]
    return made[0], made[1]


def _places(kernels: pd.Series, common: set[str]) -> list[tuple[str, str] | None]:
    """For each kernel that is not common, the common ones before and after it; None for common ones."""
    known = kernels.where(kernels.isin(common))
    before, after = known.ffill().fillna(""), known.bfill().fillna("")
    return [None if here else (first, second) for here, first, second in zip(known.notna(), before, after, strict=True)]


def _idle(sides: tuple[Trace, Trace], selection: Selection) -> tuple[list[pd.DataFrame], list[str]]:
    """The idle time of each side by cause: size and sum; none where it is not known of one of them."""
    empty = pd.DataFrame({"size": pd.Series(dtype="int64"), "sum": pd.Series(dtype="int64")})
    if any(budget(side, selection)["idle_ns"].isna().any() for side in sides):
        why = "where CUDA graphs lack their kernels, or work of the GPU is not read: busy time is compared"
        return [empty, empty], [f"idle time is not known {why}"]
    if selection.name is not None or selection.range is not None:
        return [empty, empty], ["busy time of the chosen operations is compared, without the idle time between them"]
    found = []
    for side in sides:
        causes = idle_by_cause(gaps(side, selection)).groupby("cause")[["gaps", "time_ns"]].sum()
        causes.index = IDLE + causes.index.astype("str")
        found.append(causes.rename(columns={"gaps": "size", "time_ns": "sum"}))
    return found, []


def _remarks(a: pd.DataFrame, b: pd.DataFrame, units: Units | None) -> list[str]:
    told = []
    per_unit = [len(a), len(b)] if units is None else [len(a) / units.a, len(b) / units.b]
    if units is not None and units.differ:
        told.append(f"A has {units.a:,.4g} and B {units.b:,.4g} of {units.name!r}: compare them by one")
    choose = setting("window", "range") if on_command_line() else "window_ns or range of a Selection"
    if max(per_unit) > (UNEQUAL_ALONE if units is None else UNEQUAL) * max(min(per_unit), 1e-9):
        told.append(
            f"{len(a):,} and {len(b):,} operations"
            + ("" if units else ", and no range that both sides have tells how often each did its work")
            + f": do both do the same work? {choose} choose a part"
        )
    return told
