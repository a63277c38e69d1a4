"""The waits of ranks for each other: the collectives of all ranks side by side, on one clock.

A collective cannot end before its last rank has arrived. Until then the other ranks wait, and this time shows up as
communication although nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from labkit.nsys.analysis.attribution import attribute
from labkit.nsys.analysis.rank_numbers import NUMBERED, ranks
from labkit.nsys.analysis.steps import steps
from labkit.nsys.analysis.work import NO_STAGE, StepWork, work
from labkit.nsys.trace import Trace, TraceError
from labkit.stages import Stage

KEY = ["phase", "step", "layer", "order"]


@dataclass(frozen=True)
class Collectives:
    """The collectives of all ranks, and how long the ranks waited for each other.

    Columns of `frame`, which has one row per collective and rank, in the order of time:

    - phase, step (of the rank within the phase), layer (<NA>: outside the layers);
    - order: the number of the collective within these three;
    - rank, start_ns, end_ns;
    - wait_ns: from the rank's arrival to the last rank's;
    - transfer_ns: from the last rank's arrival to the end;
    - skew_ns: from the first arrival to the last;
    - last: whether this rank arrived last.

    Columns of `ranks`, which has one row per rank:

    - collectives, wait_ms, transfer_ms;
    - last: how often the rank arrived last;
    - wait_share: of the time of its steps;
    - mostly_for: the rank that it waited longest for; <NA>: it never waited.
    """

    frame: pd.DataFrame
    waits_ms: pd.DataFrame  # total wait of each rank (row) for each rank that arrived last (column)
    ranks: pd.DataFrame
    remarks: tuple[str, ...]


def collectives(trace: Trace) -> Collectives:
    """The k-th all-reduce of each phase, step and layer, matched across the ranks.

    On GPUs a collective is an operation of the stage all_reduce or a kernel of NCCL, which starts when its rank arrives
    and spins until the last rank has arrived. On CPUs it is a range of the stage. TraceError for fewer than two ranks
    with collectives.
    """
    attribution = attribute(trace)
    step_work = work(trace, steps(trace, attribution), attribution)
    arrivals = _arrivals(step_work)
    arrivals["rank"], number_remarks = _ranks(trace, arrivals["process"].to_numpy())
    count = arrivals["rank"].nunique()
    if count < 2:
        raise TraceError(
            f"got a trace in which {count} of {max(len(trace.processes), 1)} processes ran collectives within a step; "
            "waits need at least 2 ranks: read the reports of all ranks together, "
            "labkit.nsys.read([rank 0's, rank 1's, ...])"
        )
    matched = arrivals.groupby(KEY)["rank"].transform("nunique") == count
    frame = arrivals[matched.to_numpy()].copy()
    if frame.empty:
        raise TraceError(
            f"got {len(arrivals)} collectives of {count} ranks, but none has a partner on every other rank; "
            "expected the same steps and layers in the reports of all ranks"
        )
    first, last = (frame.groupby(KEY)["start_ns"].transform(name) for name in ("min", "max"))
    frame["first_ns"], frame["wait_ns"], frame["skew_ns"] = first, last - frame["start_ns"], last - first
    frame["transfer_ns"] = (frame["end_ns"] - last).clip(lower=0)
    last_ranks = frame.loc[frame.groupby(KEY)["start_ns"].idxmax().to_numpy(), [*KEY, "rank"]]
    frame = frame.merge(last_ranks.rename(columns={"rank": "waits_for"}), on=KEY)
    frame["last"] = frame["rank"] == frame["waits_for"]
    remarks = [*number_remarks, *_remarks(trace, step_work, frame, len(arrivals) - len(frame))]
    ranks, waits_ms = _by_rank(step_work, frame)
    shown = frame.assign(layer=frame["layer"].astype("Int64").replace(-1, pd.NA))
    shown = shown.sort_values(["first_ns", *KEY, "rank"], ignore_index=True)
    columns = [*KEY, "rank", "start_ns", "end_ns", "wait_ns", "transfer_ns", "skew_ns", "last"]
    return Collectives(shown[columns], waits_ms, ranks, tuple(remarks))


def _arrivals(step_work: StepWork) -> pd.DataFrame:
    """One row per collective of each process: the whole range of an all-reduce, or a kernel of NCCL outside of one."""
    pieces = step_work.pieces[step_work.pieces["communication"].to_numpy()].reset_index(drop=True)
    ranged = pieces["stage"] == Stage.ALL_REDUCE
    collective = np.where(ranged, pieces["instance"], -1 - pieces.index)
    merged = pieces.groupby([pieces["step"], collective]).agg(
        layer=("layer", "first"), start_ns=("start_ns", "min"), end_ns=("end_ns", "max")
    )
    merged = merged.reset_index(level="step").reset_index(drop=True).sort_values("start_ns")
    step_columns = step_work.steps[["process", "phase", "index"]].iloc[merged["step"]].reset_index(drop=True)
    merged = pd.concat([merged.drop(columns="step").reset_index(drop=True), step_columns], axis=1)
    merged = merged.rename(columns={"index": "step"})
    merged["order"] = merged.groupby(["process", "phase", "step", "layer"]).cumcount()
    return merged


def _ranks(trace: Trace, process: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """The rank of each process, or its number by `ranks` where the ranks are not known."""
    rank = trace.processes["rank"].to_numpy()[process] if len(trace.processes) else process
    pairs = pd.DataFrame({"process": process, "rank": rank}).drop_duplicates()
    if (pairs["rank"] >= 0).all() and pairs["rank"].is_unique:
        return rank, []
    return ranks(trace)[process] if len(trace.processes) else process, [NUMBERED]


def _by_rank(step_work: StepWork, frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    waits = frame.pivot_table(index="rank", columns="waits_for", values="wait_ns", aggfunc="sum") / 1e6
    numbers = sorted(frame["rank"].unique())
    waits = waits.reindex(index=numbers, columns=numbers).fillna(0.0)
    groups = frame.groupby("rank")
    ranks = groups.agg(
        collectives=("last", "size"),
        last=("last", "sum"),
        wait_ms=("wait_ns", "sum"),
        transfer_ms=("transfer_ns", "sum"),
    )
    ranks[["wait_ms", "transfer_ms"]] /= 1e6
    steps_ms = step_work.steps.groupby("process")["duration_ns"].sum() / 1e6
    of_rank = groups["process"].first()
    ranks["wait_share"] = ranks["wait_ms"] / steps_ms.reindex(of_rank).to_numpy()
    ranks["mostly_for"] = waits.idxmax(axis=1).where(waits.max(axis=1) > 0).astype("Int64")
    return ranks, waits


def _remarks(trace: Trace, step_work: StepWork, frame: pd.DataFrame, unmatched: int) -> list[str]:
    remarks = [line for line in trace.source.skipped if "clock" in line]
    if unmatched:
        arrivals = len(frame) + unmatched
        remarks.append(f"{unmatched} of {arrivals} arrivals have no partner on every rank and were left out")
    outside = step_work.pieces["communication"] & (step_work.pieces["stage"] == NO_STAGE)
    if outside.any():
        remarks.append(
            f"{int(outside.sum())} NCCL kernels are in no stage; they were matched by their order in the step"
        )
    typical = step_work.steps["duration_ns"].median()
    if frame["skew_ns"].median() > typical:
        remarks.append(
            f"the ranks arrive {frame['skew_ns'].median() / 1e6:.2f} ms apart, longer than a step takes "
            f"({typical / 1e6:.2f} ms): their clocks or their first steps do not line up, so the waits mean nothing"
        )
    return remarks
