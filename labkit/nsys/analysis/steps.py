"""The steps of a trace: one pass of the model for one token, or for a prompt.

The time of a step is the time that it adds to the run. On a CPU this is its range, from the embedding to the end of
the choice of a token. On a GPU launches are asynchronous, and the range may end long before its work does. The GPU's
clock counts there: from the step's first operation to the first operation of the next decode step. Such steps tile the
run, whether the CPU limits it (then the GPU idles within the step) or the GPU does (then the CPU waits in some later
range). A step without a next decode step ends with its range or its last operation, whichever is later, and is not
`whole`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from labkit.nsys.analysis.attribution import Attribution, attribute
from labkit.nsys.analysis.labelled import labelled, step_spans
from labkit.nsys.arrays import Ints
from labkit.nsys.trace import Trace, TraceError
from labkit.stages import DOMAIN, Phase

GPU, CPU = "GPU", "CPU"
COLUMNS = (
    *("range", "process", "rank", "tid", "phase", "index", "start_ns", "end_ns", "duration_ns"),
    *("range_start_ns", "range_end_ns", "clock", "whole"),
)
HOW_TO_GET_RANGES = (
    "record a run of labkit's engine or of an annotated model with `labkit profile` or labkit.nsys.profile; "
    "`labkit doctor` tells whether this nsys drops Python's NVTX ranges"
)


def steps(trace: Trace, attribution: Attribution | None = None) -> pd.DataFrame:
    """One row per step, by thread and start. TraceError where the trace has no range of labkit.

    Columns:

    - range: the row in trace.ranges that opened the step;
    - process, rank, tid, phase, index (within the phase of its thread);
    - clock: "GPU" or "CPU";
    - start_ns, end_ns, duration_ns: on this clock;
    - range_start_ns, range_end_ns: on the CPU;
    - whole: whether its end is known, see above.

    labkit.nsys.analysis.labelled.step_spans says what opens and ends a step without a range of its own.
    """
    labels, files = labelled(trace), " ".join(trace.source.files) or "the trace"
    if labels.empty:
        domains = ", ".join(sorted({name for name in trace.ranges["domain"].cat.categories if name})) or "none"
        raise TraceError(
            f"{files}: no range of labkit among {len(trace.ranges)} ranges (domains: {domains}); expected ranges such "
            f"as 'decode/layer.3/qkv' of the domain {DOMAIN!r}; {HOW_TO_GET_RANGES}"
        )
    rows = step_spans(labels).sort_values(["process", "tid", "start_ns"], ignore_index=True)
    if rows.empty:
        raise TraceError(
            f"{files}: {len(labels)} ranges of labkit, but none of a step or a stage; expected ranges such as "
            f"'decode/layer.3/qkv'; {HOW_TO_GET_RANGES}"
        )
    opening = labels.set_index("range").loc[rows["range"]]
    ranks = trace.processes["rank"].to_numpy()
    rows = rows.rename(columns={"start_ns": "range_start_ns", "end_ns": "range_end_ns"}).assign(
        rank=ranks[rows["process"]] if len(ranks) else -1, phase=opening["phase"].to_numpy()
    )
    rows["index"] = rows.groupby(["process", "tid", "phase"]).cumcount()
    following = rows[["process", "tid", "phase"]].shift(-1)
    same_thread = (following[["process", "tid"]] == rows[["process", "tid"]]).all(axis=1)
    rows["whole"] = same_thread & (following["phase"] == Phase.DECODE)
    on_gpu = _on_gpu(trace, attribution or attribute(trace), rows) if trace.on_gpu else None
    if on_gpu is None:
        rows = rows.assign(start_ns=rows["range_start_ns"], end_ns=rows["range_end_ns"], clock=CPU)
        rows["whole"] |= opening["step"].to_numpy()
    else:
        rows = on_gpu
    rows["duration_ns"] = rows["end_ns"] - rows["start_ns"]
    return rows[list(COLUMNS)].reset_index(drop=True)


def within_steps(events: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """The events that begin within the range of a step of their thread, cut to that range.

    Columns of `events`: process, tid, start_ns, end_ns. Adds step (its position in `steps`) and thread (a number for
    process and tid).
    """
    parts = [events.iloc[:0].assign(step=0, thread=0)]
    for thread, ((process, tid), rows) in enumerate(steps.groupby(["process", "tid"]).indices.items()):
        start, end = (steps[name].to_numpy()[rows] for name in ("range_start_ns", "range_end_ns"))
        own = events[(events["process"].eq(process) & events["tid"].eq(tid)).to_numpy()]
        begins = own["start_ns"].to_numpy()
        at = np.searchsorted(start, begins, side="right") - 1
        inside = (at >= 0) & (begins < end[np.maximum(at, 0)])
        own, at = own[inside], at[inside]
        parts.append(own.assign(step=rows[at], thread=thread, end_ns=np.minimum(own["end_ns"].to_numpy(), end[at])))
    return pd.concat(parts)


def steps_of_operations(steps: pd.DataFrame, attribution: Attribution) -> Ints:
    """For each operation the position of its step in `steps`; -1: none."""
    positions = pd.Series(np.arange(len(steps)), index=steps["range"])
    return positions.reindex(attribution.step_of_operation).fillna(-1).to_numpy(np.int64)


def _on_gpu(trace: Trace, attribution: Attribution, rows: pd.DataFrame) -> pd.DataFrame | None:
    """The steps on the GPU's clock, without the steps that have no GPU work. None if no step has any."""
    of_step = steps_of_operations(rows, attribution)
    in_step = of_step >= 0
    spans = (
        trace.operations[in_step].groupby(of_step[in_step]).agg(start_ns=("start_ns", "min"), end_ns=("end_ns", "max"))
    )
    if spans.empty:
        return None
    timed = rows.iloc[spans.index].assign(start_ns=spans["start_ns"].to_numpy(), clock=GPU)
    next_start = timed["start_ns"].shift(-1, fill_value=0)
    next_has_work = np.append(np.diff(spans.index), 0) == 1
    timed["whole"] &= next_has_work & (next_start > timed["start_ns"])
    open_end = np.maximum(spans["end_ns"].to_numpy(), timed["range_end_ns"])
    timed["end_ns"] = next_start.where(timed["whole"], open_end)
    return timed
