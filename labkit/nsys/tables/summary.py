"""The summary of a trace: its contents, and the tables that show where its time goes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from labkit.nsys.analysis.rank_numbers import NUMBERED, ranks, ranks_are_known
from labkit.nsys.kept_results import Packed, Unpacked, kept
from labkit.nsys.reader.reading import read
from labkit.nsys.tables.budget import budget
from labkit.nsys.tables.catalogue import IDLE, SUMMARY
from labkit.nsys.tables.doubts import doubts
from labkit.nsys.tables.gaps import gaps, idle_by_cause
from labkit.nsys.tables.losses import losses
from labkit.nsys.tables.operations import calls, copies, kernels
from labkit.nsys.tables.ranges import ranges
from labkit.nsys.tables.rank_waits import RankWaits, rank_waits
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.trace import EXPORT_AGAIN, Source, Trace, TraceError
from labkit.system.home import expanded

WHOLE_GRAPHS = "CUDA graphs were traced whole: idle time inside of them is not seen, and their kernels have no rows"


@dataclass(frozen=True)
class TraceSummary:
    """The tables of one trace. A table is empty if the trace has no data for it."""

    source: Source
    contents: pd.DataFrame  # see `contents`
    budget: pd.DataFrame  # see the functions of these names in the modules of labkit.nsys.tables
    idle: pd.DataFrame  # see labkit.nsys.tables.gaps.idle_by_cause
    kernels: pd.DataFrame
    copies: pd.DataFrame
    calls: pd.DataFrame
    ranges: pd.DataFrame
    losses: pd.DataFrame
    remarks: tuple[str, ...]  # to read before trusting the tables
    ranks_known: bool = True  # whether the run itself named the ranks

    @property
    def frames(self) -> dict[str, pd.DataFrame]:
        """The tables by name."""
        return {table.name: getattr(self, table.name) for table in SUMMARY}


def summary_of(files: Sequence[Path], selection: Selection = EVERYTHING) -> TraceSummary:
    """`summarise` of the traces in these files, or its earlier result for the same contents and names."""
    files = [expanded(file) for file in files]
    settings = f"summary {selection} {[path.name for path in files]}"  # a name may tell the rank
    return kept(files, settings, lambda: summarise(read(files), selection), pack=_packed, unpack=_unpacked)


def _packed(summary: TraceSummary) -> Packed:
    about = {"source": asdict(summary.source), "remarks": summary.remarks, "ranks_known": summary.ranks_known}
    return Packed(about, summary.frames)


def _unpacked(result: Unpacked) -> TraceSummary:
    frames = {table.name: result.batches[table.name].to_pandas() for table in SUMMARY}
    remarks, ranks_known = tuple(result.about["remarks"]), result.about["ranks_known"]
    return TraceSummary(Source.kept(result.about["source"]), **frames, remarks=remarks, ranks_known=ranks_known)


def summarise(trace: Trace, selection: Selection = EVERYTHING) -> TraceSummary:
    """All tables of a trace, or of a part of it."""
    spent = budget(trace, selection)
    idle = gaps(trace, selection) if spent["idle_ns"].notna().any() else None
    waits = _waits(trace, selection)
    return TraceSummary(
        source=trace.source,
        contents=contents(trace),
        budget=spent,
        idle=pd.DataFrame(columns=list(IDLE.columns)) if idle is None else idle_by_cause(idle),
        kernels=kernels(trace, selection),
        copies=copies(trace, selection),
        calls=calls(trace, selection),
        ranges=ranges(trace, selection),
        losses=losses(trace, selection, idle=idle, waits=waits, spent=spent),
        remarks=tuple(_remarks(trace, spent)),
        ranks_known=ranks_are_known(trace),
    )


def _waits(trace: Trace, selection: Selection) -> RankWaits | None:
    """The waits of the ranks for each other; None if fewer than two ranks exchange data."""
    with suppress(TraceError):
        return rank_waits(trace, selection) if len(trace.processes) > 1 else None
    return None


def contents(trace: Trace) -> pd.DataFrame:
    """The number of recorded rows of each kind and process, with their times.

    Its columns: what (kernels, copies, ...), process, rank, count, start_ns, end_ns.
    """
    kinds = {"ranges": "ranges", "api": _calls_of_runtime(trace), "op": "PyTorch operators", "os": "system calls"}
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
    table = pd.concat(parts, ignore_index=True)
    table.insert(2, "rank", of_rank[table["process"].to_numpy(int)])
    return table.sort_values(["rank", "what"], ignore_index=True)


def _calls_of_runtime(trace: Trace) -> str:
    names = trace.calls["name"].array[(trace.calls["kind"] == "api").to_numpy()]
    return "CUDA calls" if any(str(name).startswith("cu") for name in names.unique()) else "calls of the runtime"


def _remarks(trace: Trace, spent: pd.DataFrame) -> list[str]:
    remarks = []
    on_cpu = ", so times of ranges are on the CPU" * bool(len(trace.ranges))
    if not_read := trace.source.not_read:
        consequence = ", so idle time is not known, and busy time is without it" if trace.on_gpu else on_cpu
        remarks.append(f"there is {'' if trace.on_gpu else 'only '}{not_read}{consequence}; {EXPORT_AGAIN}")
    elif not trace.on_gpu:
        remarks.append(f"no GPU work was recorded{on_cpu}")
    unseen = int(spent.drop_duplicates("process")["graphs_unseen"].sum()) if len(spent) else 0
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
        remarks.append(f"some processes begin {apart:,.3f} ms after others have ended: two runs, or different clocks")
    if len(trace.processes) > 1 and not ranks_are_known(trace):
        remarks.append(NUMBERED)
    return [*remarks, *doubts(trace)]
