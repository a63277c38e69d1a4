"""Writes a script that runs one recorded operator of PyTorch again, without the trace."""

from __future__ import annotations

import json
import pprint
from pathlib import Path

import numpy as np
import pandas as pd

from labkit.nsys.analysis.containment import NONE, on_one_line, parents
from labkit.nsys.arrays import Ints
from labkit.nsys.tables.operator_work import operator_work, parsed
from labkit.nsys.tables.operators import operator_of
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.trace import Trace, TraceError
from labkit.system.nearest import did_you_mean
from labkit.system.whole_file import write_whole

SCRIPT = '''"""{name}, as {file} recorded it: {count:,} calls of these shapes.

python {script} [--device cpu]
"""

from labkit.harness.replay import RecordedCall, replay

CALL = {call}

if __name__ == "__main__":
    replay(CALL)
'''


def replayable(trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    """The operators whose inputs were recorded, by name and inputs, those with the most time first: name, inputs (as
    the trace has them), count, total_ns, median_ns (of a call: on the GPU where it launched anything, else on the CPU),
    on_gpu.
    """
    calls = trace.calls
    asked = selection.of(trace, "calls", among=((calls["kind"] == "op") & (calls["inputs"] != "")).to_numpy())
    rows = np.flatnonzero(asked)
    on_gpu = _gpu_ns(trace)[rows]
    on_cpu = (calls["end_ns"] - calls["start_ns"]).to_numpy()[rows]
    frame = calls.iloc[rows][["name", "inputs"]].astype("str")
    frame = frame.assign(time_ns=np.where(on_gpu > 0, on_gpu, on_cpu), on_gpu=on_gpu > 0)
    table = frame.groupby(["name", "inputs"]).agg(
        count=("time_ns", "size"),
        total_ns=("time_ns", "sum"),
        median_ns=("time_ns", "median"),
        on_gpu=("on_gpu", "any"),
    )
    return table.reset_index().sort_values("total_ns", ascending=False, ignore_index=True)


def _gpu_ns(trace: Trace) -> Ints:
    """For each row of `trace.calls`, if it is an operator, the time of the GPU operations launched in it, those of
    operators in it included.
    """
    of = operator_of(trace)
    lasted = (trace.operations["end_ns"] - trace.operations["start_ns"]).to_numpy()
    spent = np.bincount(of[of != NONE], lasted[of != NONE], minlength=len(trace.calls)).astype(np.int64)
    operators = np.flatnonzero((trace.calls["kind"] == "op").to_numpy())
    (line,) = on_one_line([trace.calls.iloc[operators]])
    parent, level = parents(line)
    for at in np.argsort(-level, kind="stable").tolist():
        if parent[at] != NONE:
            spent[operators[parent[at]]] += spent[operators[at]]
    return spent


def write_replay(trace: Trace, op: str, output: Path, selection: Selection = EVERYTHING, *, nth: int = 1) -> Path:
    """Writes a script that replays the operator `op` with those of its recorded inputs that took the most time, or the
    n-th most. Returns `output`. TraceError: it is not in the trace, or its inputs were not recorded.
    """
    found = replayable(trace, selection)
    if found.empty:
        raise TraceError(
            "got a trace without inputs of operators; record them: torch.profiler.profile(record_shapes=True)"
        )
    mine = found[(found["name"] == op) | (found["name"] == f"aten::{op}")].reset_index(drop=True)
    if mine.empty:
        most = ", ".join(dict.fromkeys(found["name"].head(8)))
        near = did_you_mean(op, found["name"].unique())
        raise TraceError(f"got the operator {op!r}{near}, expected one with recorded inputs, such as {most}")
    if not 1 <= nth <= len(mine):
        raise TraceError(f"got {nth} as the place of the inputs, expected 1 to {len(mine)}: so many has {op}")
    row = mine.iloc[nth - 1]
    told, work = json.loads(row["inputs"]), operator_work(row["name"], row["inputs"])
    inputs = parsed(row["inputs"])
    count = len(inputs.dims) if inputs else 0
    device = str(trace.devices["name"].iloc[0]) if len(trace.devices) else "a GPU"
    call = {
        "name": row["name"],
        "dims": tuple(_tuples(each) for each in told["dims"]),
        "types": tuple((told.get("types", []) + [""] * count)[:count]),
        "strides": tuple(_tuples(each) for each in told.get("strides", [])),
        "values": tuple(map(str, told.get("values", []))),
        "traced_us": round(float(row["median_ns"]) / 1e3, 3),
        "traced_on": device if row["on_gpu"] else "the CPU",
        "flops": work.flops if work else 0,
        "bytes": work.bytes if work else 0,
    }
    text = ",\n".join(f"    {name}={_written(value, 6 + len(name))}" for name, value in call.items())
    files = ", ".join(trace.source.files).replace("\\", "/").replace('"""', "'''")
    script = SCRIPT.format(
        name=row["name"], file=files, count=row["count"], script=output.name, call=f"RecordedCall(\n{text},\n)",
    )  # fmt: skip
    write_whole(output, script)
    return output


def _tuples(each: object) -> object:
    return tuple(_tuples(part) for part in each) if isinstance(each, list) else each


def _written(value: object, indent: int) -> str:
    return pprint.pformat(value, width=112 - indent).replace("\n", "\n" + " " * indent)
