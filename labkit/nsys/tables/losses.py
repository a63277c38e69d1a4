"""The largest losses of time that a trace proves, with the place to look at and the usual remedy.

Each loss is a part of one device's span that no other loss counts. It is an upper bound of the possible gain, because
time saved in one place may be lost to the next limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd

from labkit.nsys.analysis.launches import shared_launches
from labkit.nsys.analysis.rank_numbers import rank_word
from labkit.nsys.tables.budget import budget
from labkit.nsys.tables.catalogue import LOSSES
from labkit.nsys.tables.gaps import SHORT_NS
from labkit.nsys.tables.host_causes import ALLOCATED, CALLED, HOST, HOST_CAUSES, SYNCHRONISED
from labkit.nsys.tables.kernel_names import brief, cut
from labkit.nsys.tables.places import on_device, ranges_around
from labkit.nsys.tables.rank_waits import RankWaits
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.tables.work_kinds import COPY, KINDS_OF_WORK, work_kinds
from labkit.nsys.trace import Trace
from labkit.system.asked_from import on_command_line

MOST, SMALLEST_SHARE = 3, 0.01
MOST_LOOKED_AT = 20_000  # gaps whose ranges are looked up
LAUNCH_NS = 50_000  # a longer gap is not due to a launch alone
HELPS = {
    HOST: "CUDA graphs, a larger batch, less work of the CPU between launches",
    SYNCHRONISED: "no cudaDeviceSynchronize, cudaStreamSynchronize or cudaMemcpy in the loop: streams and events order "
    "work without the host",
    ALLOCATED: "buffers that are allocated once, or cudaMallocAsync, which has a pool",
    "first": "a warm-up before the measurement: the first launch of a kernel loads its code",
    "short": "fused kernels, or CUDA graphs, which launch many at once",
    "idle": "record ranges, and look at what the CPU did in this time",
    "recorded": "look at what the CPU did in this time",
    "shared": "a profiler that numbers launches: here kernels share one number, so their launches cannot be told apart",
    "pageable": "pinned memory and asynchronous copies on a stream of their own, so that copies overlap kernels",
    "copy": "asynchronous copies on a stream of their own, which overlap kernels; fewer or smaller copies",
    "own copy": "layouts that need no copy: fused kernels, writing results where they are needed",
    "communication": "overlap with computing (buckets, a stream of its own), fewer and larger messages",
    "straggler": "equal work for all ranks; look at this rank's work before it arrived, its clocks and its CPU",
}
HELPS_PYTORCH = HELPS | {
    HOST: "CUDA graphs or torch.compile, a larger batch, less Python between launches",
    SYNCHRONISED: "no .item(), .cpu(), print or nonzero() of tensors in the loop; copies with non_blocking=True",
    ALLOCATED: "buffers that are allocated once; no empty_cache() in the loop; a warmed-up caching allocator",
    "idle": "record PyTorch's operators or ranges, and look at what the CPU did in this time",
    "pageable": "pinned memory, non_blocking=True and a stream of their own, so that copies overlap kernels",
    "copy": "non_blocking=True and a stream of their own, so that copies overlap kernels; fewer or smaller copies",
    "own copy": "layouts that need no copy: views, fused kernels, writing results where they are needed",
}
PYTORCH = re.compile(r"^aten::|\bat::native::|^triton_|ProfilerStep")


@dataclass(frozen=True)
class Loss:
    """A loss of time on one device."""

    loss: str  # its kind, in words
    rank: int
    device: int
    gpu: str  # the device, in words
    time_ns: int
    share: float  # of the device's span
    evidence: str
    start_ns: int  # start and end of the stretch to look at first
    end_ns: int
    helps: str  # the usual remedy


def losses(
    trace: Trace,
    selection: Selection = EVERYTHING,
    *,
    idle: pd.DataFrame | None = None,
    waits: RankWaits | None = None,
    spent: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """At most MOST losses, the largest first, each of at least a hundredth of the span: see `Loss` for the columns.

    idle: the gaps of `labkit.nsys.tables.gaps`, if idle time is known. waits: of `rank_waits`, for several ranks.
    spent: the `budget`, if it is known already.
    """
    candidates: list[Loss] = []
    if trace.source.unread_work:  # the device may have been busy with it where nothing seems to run
        return pd.DataFrame(columns=list(LOSSES.columns))
    word, places = rank_word(trace), (budget(trace, selection) if spent is None else spent).to_dict("records")
    for place in places:
        place |= {"gpu": f"{word} {place['rank']}'s GPU" if len(places) > 1 or word == "rank" else "the GPU"}
        candidates += list(_of_idle_time(trace, place, idle)) if idle is not None else []
        candidates += list(_of_copies(trace, place))
        candidates += list(_of_communication(place, waits, word))
    best: dict[str, Loss] = {}
    for loss in candidates:
        if loss.share >= SMALLEST_SHARE and (loss.loss not in best or loss.share > best[loss.loss].share):
            best[loss.loss] = loss
    largest = sorted(best.values(), key=lambda loss: -loss.share)[:MOST]
    return pd.DataFrame([asdict(loss) for loss in largest], columns=list(LOSSES.columns))


def sentence(loss: dict[str, object]) -> str:
    """A row in words: the loss, the place to look at, the remedy."""
    share, took = float(str(loss["share"])), int(str(loss["time_ns"])) / 1e6
    opens, closes = (int(str(loss[name])) for name in ("start_ns", "end_ns"))
    window = f"Selection(window_ns=({opens}, {closes}))"
    if on_command_line():
        window = f"--window {opens / 1e6:.3f}:{closes / 1e6:.3f}"
    return (
        f"{share:.1%} of the time of {loss['gpu']} ({took:,.3f} ms): {loss['loss']}. {loss['evidence']}; "
        f"look at {window}. What helps: {loss['helps']}."
    )


def _of_idle_time(trace: Trace, place: dict, all_gaps: pd.DataFrame) -> Iterator[Loss]:
    own = all_gaps[((all_gaps["rank"] == place["rank"]) & (all_gaps["device"] == place["device"])).to_numpy()]
    operations = trace.operations
    lasted = (operations["end_ns"] - operations["start_ns"]).to_numpy()[own["row"].to_numpy()]
    short = (lasted < SHORT_NS) & (own["time_ns"].to_numpy() < LAUNCH_NS)
    waited, unknown = own["latency_ns"] + own["queued_ns"], own["unknown_ns"]
    host = {cause: own["host_ns"].where(own["host_cause"] == cause, 0) for cause in HOST_CAUSES}
    first = (~operations.duplicated(["process", "name"])).to_numpy()[own["row"].to_numpy()]
    first &= (own["launch_ns"] >= LAUNCH_NS).to_numpy()
    parts = (
        ("idle, waiting for the host", HOST, host[HOST] + host[CALLED] + own["launch_ns"].where(~first, 0)),
        ("idle, while kernels were launched for the first time", "first", own["launch_ns"].where(first, 0)),
        ("idle, because the host waited for the GPU", SYNCHRONISED, host[SYNCHRONISED]),
        ("idle, while the host allocated memory", ALLOCATED, host[ALLOCATED]),
        ("idle before kernels shorter than 10 µs", "short", waited.where(short, 0)),
        ("idle, for reasons that the trace does not tell", _unexplained(trace, own), waited.where(~short, 0) + unknown),
    )
    for kind, helps, time in parts:
        if time.sum():
            yield _loss(kind, place, int(time.sum()), *_evidence(trace, own, time), _helps(trace)[helps])


def _unexplained(trace: Trace, own: pd.DataFrame) -> str:
    """The remedy for idle time without a known reason: a key of HELPS."""
    shared = shared_launches(trace)[own["row"].to_numpy()]
    if own["unknown_ns"].where(shared, 0).sum() > own["time_ns"].sum() / 2:
        return "shared"
    return "recorded" if len(trace.ranges) or (trace.calls["kind"] == "op").any() else "idle"


def _helps(trace: Trace) -> dict[str, str]:
    """The remedies, in PyTorch's words if the program uses PyTorch."""
    named = (frame["name"].cat.categories for frame in (trace.calls, trace.ranges, trace.operations))
    return HELPS_PYTORCH if any(PYTORCH.search(str(name)) for names in named for name in names) else HELPS


def _evidence(trace: Trace, own: pd.DataFrame, time: pd.Series) -> tuple[str, int, int]:
    worst = own.loc[time.idxmax()]
    has_part = (time > 0).to_numpy()
    longest = time[has_part].nlargest(MOST_LOOKED_AT)
    around = longest.groupby(ranges_around(trace, own.loc[longest.index, "row"].to_numpy())).sum()
    named = around.drop("", errors="ignore")
    mostly = ""
    if len(named) and named.max() > 0.25 * time.sum():
        mostly = f", {named.max() / time.sum():.0%} of it before work of the range '{named.idxmax()}'"
    awaited = f" in {worst['awaited']}" if worst["awaited"] else ""
    count = int(has_part.sum())
    gaps_text = f"{count:,} gaps{mostly}; the longest" if count > 1 else f"one gap{mostly}"
    text = f"{gaps_text}, {_took(int(worst['time_ns']))}{awaited}, ends with {cut(brief(worst['next']), 60)}"
    return text, int(worst["start_ns"]), int(worst["start_ns"] + worst["time_ns"])


def _of_copies(trace: Trace, place: dict) -> Iterator[Loss]:
    if not place["exposed_copy_ns"]:
        return
    operations = trace.operations
    ran_here = on_device(operations, place["process"], place["device"])
    rows = operations[ran_here & (work_kinds(operations) == KINDS_OF_WORK.index(COPY))]
    times = rows["end_ns"] - rows["start_ns"]
    worst = rows.loc[times.idxmax()]
    kinds = times.groupby(rows["name"].astype("str")).sum().sort_values(ascending=False)
    within = kinds.index[0] in ("DtoD", "memset")
    text = f"{len(rows):,} copies and memsets, mostly {kinds.index[0]}"
    if worst["bytes"]:
        text += f"; the longest moves {_size(int(worst['bytes']))}"
    if "Pageable" in str(worst["memory"]):
        text += " of pageable memory"
    bounds = (int(worst["start_ns"]), int(worst["end_ns"]))
    pageable = times[rows["memory"].astype("str").str.contains("Pageable")].sum() > times.sum() / 2
    helps = _helps(trace)["own copy" if within else "pageable" if pageable else "copy"]
    yield _loss("copies while no kernel runs", place, place["exposed_copy_ns"], text, *bounds, helps)


def _of_communication(place: dict, waits: RankWaits | None, word: str) -> Iterator[Loss]:
    exposed, late_ns = place["exposed_communication_ns"], 0
    if waits is not None and len(stragglers := waits.stragglers):
        by_rank = stragglers[stragglers["rank"] != place["rank"]].groupby("rank")["late_ns"].sum()
        if len(by_rank):
            rank, late_ns = int(by_rank.idxmax()), min(int(by_rank.max()), exposed)
            straggler = stragglers[stragglers["rank"] == rank].iloc[0]
            frame = waits.frame[(waits.frame["last"] == str(rank)) & (waits.frame["range"] == straggler["range"])]
            worst = frame.loc[frame["skew_ns"].idxmax()]
            text = (
                f"{word} {rank} arrives last {int(straggler['times'])} times, by up to {_took(int(worst['skew_ns']))}"
            )
            text += f", in the range '{straggler['range']}'" if straggler["range"] else ""
            bounds = (int(worst["start_ns"]), int(worst["start_ns"] + worst["skew_ns"]))
            yield _loss(f"waiting for {word} {rank}", place, late_ns, text, *bounds, HELPS["straggler"])
    if exposed > late_ns:
        kind, helps = "communication while nothing computes", HELPS["communication"]
        text = f"{exposed / 1e6:,.3f} ms of {place['communication_ns'] / 1e6:,.3f} ms of communication run alone"
        bounds = (place["start_ns"], place["start_ns"] + place["span_ns"])
        yield _loss(kind, place, exposed - late_ns, text, *bounds, helps)


def _loss(kind: str, place: dict, time_ns: int, text: str, start: int, end: int, helps: str) -> Loss:
    share = time_ns / max(place["span_ns"], 1)
    return Loss(
        kind, int(place["rank"]), int(place["device"]), place["gpu"], int(time_ns), float(np.round(share, 6)), text,
        start, end, helps,
    )  # fmt: skip


def _took(time_ns: int) -> str:
    return f"{time_ns / 1e6:,.2f} ms" if time_ns >= 1e6 else f"{time_ns / 1e3:,.1f} µs"


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} KB"
