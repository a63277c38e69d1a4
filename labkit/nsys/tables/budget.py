"""The time of each device: computing, communicating, copying or idle, and how much of it overlapped."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.intervals import Union
from labkit.nsys.arrays import Ints
from labkit.nsys.tables.catalogue import BUDGET, PARTS
from labkit.nsys.tables.places import devices, on_device
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.tables.work_kinds import COMMUNICATION, COMPUTE, COPY, KINDS_OF_WORK, graph_launches, work_kinds
from labkit.nsys.trace import Trace


def budget(trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    """One row per rank and device. Its columns:

    - rank, process, device, name;
    - operations: their number;
    - start_ns, span_ns: from the first operation's start to the last one's end, or the window's part of this time;
    - busy_ns: any operation ran;
    - compute_ns: a kernel ran that does not communicate;
    - exposed_communication_ns: kernels communicated and none computed;
    - exposed_copy_ns: copies or memsets ran and no kernel did;
    - idle_ns: nothing ran. The last three and compute_ns add up to span_ns;
    - busy_share, compute_share, exposed_communication_share, exposed_copy_share, idle_share: of span_ns;
    - communication_ns, copy_ns: any communication, or any copy, ran;
    - communication_hidden, copy_hidden: the share of these times that is not exposed (<NA> if they are 0);
    - graphs: launches of CUDA graphs by the process;
    - graphs_unseen: launches without a kernel in the trace. With any, idle_ns is <NA>, since the graph may have kept
      the device busy.

    Work of the device that was not read (`Source.unread_work`) makes idle_ns, exposed and hidden times <NA>. Time
    before a device's first operation and after its last one does not count. Time in which several operations run
    counts once.
    """
    operations = trace.operations
    selected = selection.of(trace, "operations")
    kinds = work_kinds(operations)
    launches = graph_launches(trace)
    rows = []
    for place in devices(trace).itertuples(index=False):
        ran_here = on_device(operations, place.process, place.device)
        rows_of = np.flatnonzero(ran_here & selected)
        if not len(rows_of):
            continue
        opens, closes = span(trace, ran_here, rows_of, selection)
        start, end = (np.clip(operations[name].to_numpy(), opens, closes) for name in ("start_ns", "end_ns"))
        of_kind = {
            kind: Union.of(start[rows_of[kinds[rows_of] == at]], end[rows_of[kinds[rows_of] == at]])
            for at, kind in enumerate(KINDS_OF_WORK)
        }
        launched = launches[(launches["process"] == place.process).to_numpy()]
        in_span = (launched["start_ns"] < closes) & (launched["end_ns"] > opens)
        unseen = int((~launched["seen"] & in_span).sum())
        names = {"rank": place.rank, "process": place.process, "device": place.device, "name": place.name}
        rows.append(
            {
                **names,
                "operations": len(rows_of),
                "start_ns": opens,
                "span_ns": closes - opens,
                **_shares(of_kind, closes - opens, unseen > 0, bool(trace.source.unread_work)),
                "graphs": int(in_span.sum()),
                "graphs_unseen": unseen,
            }
        )
    frame = pd.DataFrame(rows, columns=[name for name in BUDGET.columns if not name.endswith("_share")]).astype(
        {
            **dict.fromkeys(("exposed_communication_ns", "exposed_copy_ns", "idle_ns"), "Int64"),
            **dict.fromkeys(("communication_hidden", "copy_hidden"), "Float64"),
        }
    )
    shares = {f"{name}_share": frame[f"{name}_ns"] / frame["span_ns"].clip(lower=1) for name in PARTS}
    return frame.assign(**shares)


def span(trace: Trace, ran_here: NDArray[np.bool_], selected: Ints, selection: Selection) -> tuple[int, int]:
    """Start and end of a device's budget. `ran_here`: which operations it ran; `selected`: rows of the budget."""
    operations = trace.operations
    rows = np.flatnonzero(ran_here) if selection.window_ns else selected
    first, last = int(operations["start_ns"].to_numpy()[rows].min()), int(operations["end_ns"].to_numpy()[rows].max())
    opens, closes = selection.window_ns or (first, last)
    return max(first, opens), min(last, closes)


def _shares(of_kind: dict[str, Union], span_ns: int, unseen: bool, unread: bool) -> dict[str, object]:
    compute, communication, copy = (of_kind[kind] for kind in (COMPUTE, COMMUNICATION, COPY))
    kernels = _joined(compute, communication)
    busy = _joined(kernels, copy)
    exposed_communication, exposed_copy = kernels.total_ns - compute.total_ns, busy.total_ns - kernels.total_ns
    return {
        "busy_ns": busy.total_ns,
        "compute_ns": compute.total_ns,
        "exposed_communication_ns": pd.NA if unread else exposed_communication,
        "exposed_copy_ns": pd.NA if unread else exposed_copy,
        "idle_ns": pd.NA if unseen or unread else span_ns - busy.total_ns,
        "communication_ns": communication.total_ns,
        "copy_ns": copy.total_ns,
        "communication_hidden": pd.NA if unread else _hidden(exposed_communication, communication.total_ns),
        "copy_hidden": pd.NA if unread else _hidden(exposed_copy, copy.total_ns),
    }


def _joined(a: Union, b: Union) -> Union:
    return Union.of(np.append(a.start_ns, b.start_ns), np.append(a.end_ns, b.end_ns))


def _hidden(exposed_ns: int, whole_ns: int) -> object:
    return 1 - exposed_ns / whole_ns if whole_ns else pd.NA
