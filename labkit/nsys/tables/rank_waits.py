"""Collectives of all ranks side by side: how long ranks wait for each other, and how fast the data then moves.

A collective that synchronises (all-reduce, all-gather, reduce-scatter, all-to-all, barrier) cannot end on any rank
before the last rank has arrived. So its time has two parts: the skew, from the first arrival to the last, in which
ranks spin without sending; and the transfer, from the last arrival on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd

from labkit.nsys.analysis.communication import communicates
from labkit.nsys.analysis.rank_numbers import rank_word, ranks
from labkit.nsys.arrays import matching
from labkit.nsys.tables.clocks import UNKNOWN_NS, Offset, aligned, matched, matched_by_ends
from labkit.nsys.tables.operator_work import element_bytes
from labkit.nsys.tables.places import ranges_around, rank_of
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.trace import Trace, TraceError

UNDECIDED = "UNDECIDED"
OTHER = "other"
OF_LIBRARIES = re.compile(r"^(?:nccl|c10d|record_param_comms)")  # ranges of PyTorch and NCCL around collectives
NAMES_KIND = re.compile(r"^nccl:\w")  # ranges that name its kind


class CollectiveKind(NamedTuple):
    """A kind of collective."""

    name: str
    pattern: str  # of the names of its kernels and ranges
    bus_factor: Callable[[int], float]  # bus bandwidth over algorithm bandwidth, for n ranks
    synchronises: bool


KINDS = (  # the first pattern found in a name counts
    CollectiveKind("all-reduce", r"all_?reduce|cross_device_reduce", lambda n: 2 * (n - 1) / n, True),
    CollectiveKind("reduce-scatter", r"reduce_?scatter", lambda n: (n - 1) / n, True),
    CollectiveKind("all-gather", r"all_?gather", lambda n: (n - 1) / n, True),
    CollectiveKind("all-to-all", r"all_?to_?all", lambda n: (n - 1) / n, True),
    CollectiveKind("barrier", r"barrier", lambda n: 0.0, True),
    CollectiveKind("broadcast", r"broadcast", lambda n: 1.0, False),
    CollectiveKind("reduce", r"_?reduce(?!\w*scatter)", lambda n: 1.0, False),
    CollectiveKind("send/receive", r"send|recv|p2p", lambda n: 1.0, False),
)


@dataclass(frozen=True)
class RankWaits:
    """The collectives of a trace and the waits of its ranks.

    Columns of `frame`, which has one row per collective that every rank of its group joined, by time:

    - start_ns: the first arrival;
    - kind, group ("" if unknown), ranks (their number);
    - bytes: of the message, for an all-gather of its output; <NA> if unknown;
    - skew_ns: from the first arrival to the last;
    - transfer_ns: from the last arrival to the last end;
    - algorithm_gb_s: bytes / transfer;
    - bus_gb_s: algorithm_gb_s times NCCL's factor for the kind, which overstates in-network reduction;
    - last: the rank that arrived last; UNDECIDED if the clocks are less certain than the skew is long;
    - range: the innermost range around the last rank's launch, without the ranges that PyTorch and NCCL open
      around collectives.

    Kinds that do not synchronise have no skew; their transfer is the longest rank's time.

    Columns of `ranks`, which has one row per rank:

    - collectives: their number;
    - last: how often the rank arrived last, without undecided collectives;
    - wait_ns: from its arrivals to the last ranks' arrivals;
    - exchange_ns: all its time in collectives;
    - offset_ns, low_ns, high_ns, residual_ns: of its clock, see `labkit.nsys.tables.clocks`.
    """

    frame: pd.DataFrame
    ranks: pd.DataFrame
    remarks: tuple[str, ...]

    @property
    def stragglers(self) -> pd.DataFrame:
        """The ranks that arrived last, by rank and range, the most lateness first, without undecided collectives.

        Its columns: rank, range, times, late_ns (the sum of the skews), median_ns (of the skews).
        """
        late = self.frame[~self.frame["last"].isin(["", UNDECIDED])].rename(columns={"last": "rank"})
        groups = late.groupby(["rank", "range"])["skew_ns"]
        table = groups.agg(times="size", late_ns="sum", median_ns="median").reset_index()
        return table.astype({"rank": "int64"}).sort_values("late_ns", ascending=False, ignore_index=True)


def arrivals(trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    """One row per kernel that communicates. Its columns:

    - row (in `trace.operations`), rank, start_ns, end_ns, kind, synchronises, group;
    - sequence: -1 if unknown; bytes: 0 if unknown;
    - size: ranks in the group; 0 if unknown;
    - token: a text that is equal on all ranks of a collective.

    The kind comes from the trace's record of the collective, else from a range such as "nccl:all_reduce", which PyTorch
    opens around the launch, else from the kernel's name.
    """
    rows = trace.operations[selection.of(trace, "operations", among=communicates(trace.operations))]
    records = [json.loads(text) if text else {} for text in rows["collective"].cat.categories.astype(str)]
    around = ranges_around(trace, rows.index.to_numpy(), matching(trace.ranges["name"], NAMES_KIND))
    parts = []
    for name, opened, text in zip(rows["name"].astype("str"), around, rows["collective"].cat.codes, strict=True):
        about = records[text]
        kind = _kind(str(about.get("name") or opened.partition("nccl:")[2] or name))
        group = str(about.get("group", ""))
        size = int(about.get("size", 0) or 0)
        message = _message_bytes(kind, about)
        token = (
            f"{kind}|{group}|{about.get('dtype', '')}|{about.get('in_elements', '')}|{about.get('out_elements', '')}"
        )
        parts.append((kind, group, int(about.get("sequence", -1)), message, size, token if about else kind))
    columns = ["kind", "group", "sequence", "bytes", "size", "token"]
    table = pd.DataFrame(parts, columns=columns, index=rows.index)
    table.insert(0, "row", rows.index)
    table.insert(1, "rank", rank_of(trace, rows))
    table["start_ns"], table["end_ns"] = rows["start_ns"], rows["end_ns"]
    table["synchronises"] = table["kind"].map({kind.name: kind.synchronises for kind in KINDS} | {OTHER: False})
    return table.sort_values("start_ns", ignore_index=True)


def rank_waits(trace: Trace, selection: Selection = EVERYTHING) -> RankWaits:
    """The collectives of all ranks of a trace, on one clock. TraceError if fewer than two ranks have collectives.

    Ranks from several files are put on one clock by their collectives, see `labkit.nsys.tables.clocks`.
    """
    arrived = arrivals(trace, selection)
    count = arrived["rank"].nunique()
    if count < 2:
        raise TraceError(
            f"got {len(arrived)} collectives of {count} of {max(len(trace.processes), 1)} processes; waits need at "
            "least 2 ranks: give the traces of all ranks together"
        )
    one_clock = len(trace.source.files) == 1
    remarks = []
    collectives, unmatched = matched(arrived)
    if unmatched and len(collectives) and (arrived["sequence"] < 0).any():
        collectives, unmatched = matched_by_ends(arrived, one_clock=one_clock)
    if unmatched:
        remarks.append(
            f"{unmatched} of {unmatched + len(collectives)} have no partner on every rank of their group: left out"
        )
    if collectives.empty:
        raise TraceError("got collectives of several ranks, but none matches one of another rank: two runs?")
    offsets, clock_remarks = aligned(collectives, one_clock=one_clock, word=rank_word(trace))
    remarks += clock_remarks
    shift = collectives["rank"].map({rank: offset.offset_ns for rank, offset in offsets.items()})
    collectives = collectives.assign(start_ns=collectives["start_ns"] + shift, end_ns=collectives["end_ns"] + shift)
    frame = _side_by_side(trace, collectives, offsets)
    return RankWaits(frame, _by_rank(collectives, frame, offsets), tuple(remarks))


def rank_tables(trace: Trace, selection: Selection) -> tuple[dict[str, pd.DataFrame], tuple[str, ...]]:
    """The tables of `labkit trace collectives`, and remarks about the matches and the clocks."""
    waits = rank_waits(trace, selection)
    return {"ranks": waits.ranks, "stragglers": waits.stragglers, "collectives": waits.frame}, waits.remarks


def on_one_clock(trace: Trace) -> Trace:
    """The trace with the clocks of its ranks set as `rank_waits` sets them, with remarks about it in `source.skipped`.

    TraceError if the ranks share no collectives.
    """
    waits = rank_waits(trace)
    offset = waits.ranks.set_index("rank")["offset_ns"].reindex(ranks(trace)).fillna(0).to_numpy(np.int64)
    residuals = waits.ranks.set_index("rank")["residual_ns"].dropna()
    remarks = [
        f"{rank_word(trace)} {rank}'s clock was set by {shift / 1e3:,.1f} µs"
        for rank, shift in zip(ranks(trace), offset, strict=True)
        if shift
    ]
    remarks += [f"the ranks' clocks are known to {int(residuals.max()) / 1e3:,.1f} µs"] if len(residuals) else []
    frames = {}
    for name, frame in trace.frames.items():
        if "process" in frame and "start_ns" in frame:
            shift = offset[frame["process"].to_numpy()]
            moved = {column: frame[column] + shift for column in ("start_ns", "end_ns") if column in frame}
            frame = frame.assign(**moved).sort_values("start_ns", kind="stable", ignore_index=True)
        frames[name] = frame
    return Trace(replace(trace.source, skipped=(*trace.source.skipped, *waits.remarks, *remarks)), **frames)


@cache
def _kind(name: str) -> str:
    return next((kind.name for kind in KINDS if re.search(kind.pattern, name, re.IGNORECASE)), OTHER)


def _message_bytes(kind: str, about: dict) -> int:
    elements = about.get("out_elements" if kind == "all-gather" else "in_elements", 0) or 0
    return int(elements) * element_bytes(str(about.get("dtype", "")))


def _side_by_side(trace: Trace, collectives: pd.DataFrame, offsets: dict[int, Offset]) -> pd.DataFrame:
    groups = collectives.groupby("match", sort=False)
    first, last = groups["start_ns"].min(), groups["start_ns"].max()
    frame = groups.agg(
        kind=("kind", "first"),
        group=("group", "first"),
        ranks=("rank", "size"),
        bytes=("bytes", "max"),
        synchronises=("synchronises", "first"),
        end_ns=("end_ns", "max"),
    )
    longest = (collectives["end_ns"] - collectives["start_ns"]).groupby(collectives["match"]).max()
    skew = (last - first).where(frame["synchronises"], 0)
    transfer = (frame["end_ns"] - last).where(frame["synchronises"], longest).clip(lower=0)
    late = collectives.loc[groups["start_ns"].idxmax()].set_index("match")
    factor = {kind.name: kind.bus_factor for kind in KINDS} | {OTHER: lambda n: 1.0}
    bus = [factor[kind](n) for kind, n in zip(frame["kind"], frame["ranks"], strict=True)]
    has_rate = (frame["bytes"] > 0) & (transfer > 0)
    algorithm = (frame["bytes"] / transfer.where(has_rate)).astype("Float64")
    error = collectives["rank"].map({rank: offset.residual_ns for rank, offset in offsets.items()})
    decided = skew > error.groupby(collectives["match"]).max()
    names = late["rank"].astype("str").where(decided, UNDECIDED).where(frame["synchronises"], "")
    table = pd.DataFrame(
        {
            "start_ns": first,
            "kind": frame["kind"],
            "group": frame["group"],
            "ranks": frame["ranks"],
            "bytes": frame["bytes"].astype("Int64").where(frame["bytes"] > 0),
            "skew_ns": skew,
            "transfer_ns": transfer,
            "algorithm_gb_s": algorithm,
            "bus_gb_s": algorithm * np.array(bus),
            "last": names,
            "range": ranges_around(trace, late["row"].to_numpy(), ~matching(trace.ranges["name"], OF_LIBRARIES)),
        }
    )
    table["match"] = table.index
    return table.sort_values("start_ns", ignore_index=True)


def _by_rank(collectives: pd.DataFrame, frame: pd.DataFrame, offsets: dict[int, Offset]) -> pd.DataFrame:
    synchronising = collectives[collectives["synchronises"]]
    wait = synchronising.groupby("match")["start_ns"].transform("max") - synchronising["start_ns"]
    groups = collectives.groupby("rank")
    table = pd.DataFrame(
        {
            "collectives": groups.size(),
            "last": frame["last"]
            .value_counts()
            .reindex([str(rank) for rank in sorted(offsets)], fill_value=0)
            .to_numpy(),
            "wait_ns": wait.groupby(synchronising["rank"]).sum().reindex(sorted(offsets), fill_value=0),
            "exchange_ns": (collectives["end_ns"] - collectives["start_ns"]).groupby(collectives["rank"]).sum(),
        }
    )
    clocks = pd.DataFrame({rank: vars(offset) for rank, offset in offsets.items()}).T.astype("Int64")
    clocks = clocks.where(clocks.abs() < UNKNOWN_NS)
    return table.join(clocks).rename_axis("rank").reset_index()
