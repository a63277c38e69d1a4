"""What is in a trace and where its time goes: the tables that a first look needs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import pandas as pd

from labkit.nsys.analysis.rank_numbers import NUMBERED, ranks, ranks_are_known
from labkit.nsys.tables.budget import budget
from labkit.nsys.tables.calls import calls
from labkit.nsys.tables.doubts import doubts
from labkit.nsys.tables.gaps import gaps, idle_by_cause
from labkit.nsys.tables.losses import losses
from labkit.nsys.tables.operations import copies, kernels
from labkit.nsys.tables.ranges import ranges
from labkit.nsys.tables.rank_waits import RankWaits, rank_waits
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.trace import Source, Trace, TraceError

WHOLE_GRAPHS = "CUDA graphs were traced whole: idle time inside of them is not seen, and their kernels have no rows"


@dataclass(frozen=True)
class TraceSummary:
    """The tables of one trace, each of them empty where the trace has nothing of the kind.

    `contents`: what (kernels, copies, ...), process, rank, count, start_ns, end_ns. The others are those of the modules
    here: `budget`, `idle`, `kernels`, `copies`, `calls`, `ranges`, `losses`. `remarks`: what a reader must know before
    trusting them. `ranks_known`: whether the run itself named the ranks.
    """

    source: Source
    contents: pd.DataFrame
    budget: pd.DataFrame
    idle: pd.DataFrame
    kernels: pd.DataFrame
    copies: pd.DataFrame
    calls: pd.DataFrame
    ranges: pd.DataFrame
    losses: pd.DataFrame
    remarks: tuple[str, ...]
    ranks_known: bool = True

    @property
    def frames(self) -> dict[str, pd.DataFrame]:
        """The tables by name."""
        names = ("contents", "budget", "idle", "kernels", "copies", "calls", "ranges", "losses")
        return {name: getattr(self, name) for name in names}


def summarise(trace: Trace, selection: Selection = EVERYTHING) -> TraceSummary:
    """All tables of a trace, or of a part of it."""
    found = budget(trace, selection)
    idle = gaps(trace, selection) if found["idle_ns"].notna().any() else None
    waits = _waits(trace, selection)
    return TraceSummary(
        source=trace.source,
        contents=contents(trace),
        budget=found,
        idle=idle_by_cause(NO_GAPS if idle is None else idle),
        kernels=kernels(trace, selection),
        copies=copies(trace, selection),
        calls=calls(trace, selection),
        ranges=ranges(trace, selection),
        losses=losses(trace, selection, found=idle, waits=waits, spent=found),
        remarks=tuple(_remarks(trace, found)),
        ranks_known=ranks_are_known(trace),
    )


def _waits(trace: Trace, selection: Selection) -> RankWaits | None:
    """Who waits for whom, where several ranks exchange anything."""
    with suppress(TraceError):
        return rank_waits(trace, selection) if len(trace.processes) > 1 else None
    return None


NO_GAPS = pd.DataFrame(
    {
        name: pd.Series(dtype="int64" if name.endswith("_ns") else "object")
        for name in ("rank", "device", "time_ns", "host_cause", "host_ns", "launch_ns", "latency_ns", "queued_ns")
    }
    | {"unknown_ns": pd.Series(dtype="int64")}
)


def contents(trace: Trace) -> pd.DataFrame:
    """How much of what each process recorded, and from when to when: what, process, rank, count, start_ns, end_ns."""
    kinds = {"ranges": "NVTX ranges", "api": "CUDA calls", "op": "PyTorch operators", "os": "system calls"}
    kinds |= {"kernel": "kernels", "memcpy": "copies", "memset": "memsets", "graph": "CUDA graphs, whole"}
    of_rank = ranks(trace)
    parts = []
    for frame in (
        trace.operations,
        trace.calls,
        trace.ranges.assign(kind=pd.Categorical(["ranges"] * len(trace.ranges))),
    ):
        groups = frame.groupby(["kind", "process"], observed=True)
        part = groups.agg(count=("start_ns", "size"), start_ns=("start_ns", "min"), end_ns=("end_ns", "max"))
        part = part.reset_index().rename(columns={"kind": "what"})
        parts.append(part.assign(what=part["what"].astype("str").map(kinds)))
    found = pd.concat(parts, ignore_index=True)
    found.insert(2, "rank", of_rank[found["process"].to_numpy(int)])
    return found.sort_values(["rank", "what"], ignore_index=True)


def _remarks(trace: Trace, found: pd.DataFrame) -> list[str]:
    remarks = []
    if not trace.on_gpu:
        remarks.append("no GPU work was recorded, so times of ranges are those on the CPU")
    if trace.source.unread_work:
        remarks.append(
            f"work of the GPU is not read ({', '.join(trace.source.unread_work)}), so idle time is not known, and busy "
            "time is that of the rest"
        )
    unseen = int(found.drop_duplicates("process")["graphs_unseen"].sum()) if len(found) else 0
    if unseen:
        remarks.append(
            f"{unseen} launches of CUDA graphs have none of their kernels in the trace, so idle time is not known; "
            "record their nodes (nsys: --cuda-graph-trace=node)"
        )
    if (trace.operations["kind"] == "graph").any():
        remarks.append(WHOLE_GRAPHS)
    spans = contents(trace).groupby("process").agg(start_ns=("start_ns", "min"), end_ns=("end_ns", "max"))
    if len(spans) > 1 and spans["start_ns"].max() > spans["end_ns"].min():
        apart = (spans["start_ns"].max() - spans["end_ns"].min()) / 1e6
        remarks.append(
            f"some processes begin {apart:,.3f} ms after others have ended: two runs, or clocks of their own"
        )
    if len(trace.processes) > 1 and not ranks_are_known(trace):
        remarks.append(NUMBERED)
    return [*remarks, *doubts(trace)]
