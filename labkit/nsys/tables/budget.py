"""What each device did with its time: computed, communicated, copied, or nothing, and how much of that overlapped."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.intervals import Union
from labkit.nsys.arrays import Ints
from labkit.nsys.tables.places import devices
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.tables.work_kinds import COMMUNICATION, COMPUTE, COPY, KINDS_OF_WORK, graph_launches, work_kinds
from labkit.nsys.trace import Trace


def budget(trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    """One row per rank and device. Its columns:

    - rank, process, device, name; operations: how many; start_ns, span_ns: from the first one's start to the last
      one's end, or the part of that which the window has;
    - busy_ns: in which anything ran; compute_ns: in which a kernel ran that does not communicate;
    - exposed_communication_ns: in which kernels communicated while none computed; exposed_copy_ns: in which copies and
      memsets ran and no kernel did; idle_ns. These three and compute_ns add up to span_ns;
    - busy_share, compute_share, exposed_communication_share, exposed_copy_share, idle_share: of span_ns;
    - communication_ns, copy_ns: in which any ran; communication_hidden, copy_hidden: the share of them that is not
      exposed (<NA> where there is none);
    - graphs, graphs_unseen: launches of CUDA graphs by the process, and those of which the trace shows no kernel. With
      any of these idle_ns is <NA>: the device may have been busy with them. Work of the device that was not read
      (`Source.unread_work`) makes idle_ns, exposed and hidden times <NA>.

    Time before a device's first operation and after its last one counts for nobody. Where operations run at the same
    time on several streams, their time counts once.
    """
    operations = trace.operations
    asked = selection.of(trace, "operations")
    kinds = work_kinds(operations)
    launches = graph_launches(trace)
    rows = []
    for place in devices(trace).itertuples(index=False):
        here = ((operations["process"] == place.process) & (operations["device"] == place.device)).to_numpy()
        mine = np.flatnonzero(here & asked)
        if not len(mine):
            continue
        opens, closes = span(trace, here, mine, selection)
        start, end = (np.clip(operations[name].to_numpy(), opens, closes) for name in ("start_ns", "end_ns"))
        of_kind = {
            kind: Union.of(start[mine[kinds[mine] == at]], end[mine[kinds[mine] == at]])
            for at, kind in enumerate(KINDS_OF_WORK)
        }
        launched = launches[(launches["process"] == place.process).to_numpy()]
        within = (launched["start_ns"] < closes) & (launched["end_ns"] > opens)
        unseen = int((~launched["seen"] & within).sum())
        known = {"rank": place.rank, "process": place.process, "device": place.device, "name": place.name}
        rows.append(
            {
                **known,
                "operations": len(mine),
                "start_ns": opens,
                "span_ns": closes - opens,
                **_shares(of_kind, closes - opens, unseen > 0, bool(trace.source.unread_work)),
                "graphs": int(within.sum()),
                "graphs_unseen": unseen,
            }
        )
    frame = pd.DataFrame(rows, columns=None if rows else list(COLUMNS)).astype(
        {
            **dict.fromkeys(("exposed_communication_ns", "exposed_copy_ns", "idle_ns"), "Int64"),
            **dict.fromkeys(("communication_hidden", "copy_hidden"), "Float64"),
        }
    )
    shares = {f"{name}_share": frame[f"{name}_ns"] / frame["span_ns"].clip(lower=1) for name in PARTS}
    return frame.assign(**shares)


def span(trace: Trace, here: NDArray[np.bool_], asked: Ints, selection: Selection) -> tuple[int, int]:
    """The time of a device that a budget is about. `here`: its operations, `asked`: rows of those asked about."""
    operations = trace.operations
    of = np.flatnonzero(here) if selection.window_ns else asked
    first, last = int(operations["start_ns"].to_numpy()[of].min()), int(operations["end_ns"].to_numpy()[of].max())
    opens, closes = selection.window_ns or (first, last)
    return max(first, opens), min(last, closes)


PARTS = ("busy", "compute", "exposed_communication", "exposed_copy", "idle")
COLUMNS = (
    *("rank", "process", "device", "name", "operations", "start_ns", "span_ns", "busy_ns", "compute_ns"),
    *("exposed_communication_ns", "exposed_copy_ns", "idle_ns", "communication_ns", "copy_ns"),
    *("communication_hidden", "copy_hidden", "graphs", "graphs_unseen"),
)


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


def _joined(one: Union, other: Union) -> Union:
    return Union.of(np.append(one.start_ns, other.start_ns), np.append(one.end_ns, other.end_ns))


def _hidden(exposed_ns: int, whole_ns: int) -> object:
    return 1 - exposed_ns / whole_ns if whole_ns else pd.NA
