"""Writes a script that runs one recorded operator of PyTorch again, without the trace."""

from __future__ import annotations

import json
import pprint
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit.nsys.analysis.containment import NONE, on_one_line, parents
from labkit.nsys.arrays import Ints
from labkit.nsys.tables.operator_work import operator_work, parsed
from labkit.nsys.tables.operators import operator_of
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.trace import Trace, TraceError
from labkit.system.home import expanded
from labkit.system.nearest import did_you_mean
from labkit.system.whole_file import write_whole

# Data from the trace go into the script only as literals, never into its docstring or a comment.
SCRIPT = '''"""An operator of PyTorch as a trace recorded it. Options: --device cpu."""

from labkit.harness.replay import RecordedCall, replay

FILES = {files}
CALLS = {count}  # of these shapes in the trace

CALL = {call}

if __name__ == "__main__":
    replay(CALL)
'''


def replayable(trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    """The operators whose inputs were recorded, by name and inputs, the most time first.

    Its columns: name, inputs (the trace's JSON), count, total_ns, median_ns, on_gpu. The time of a call is on the GPU
    if it launched GPU work, else on the CPU.
    """
    calls = trace.calls
    selected = selection.of(trace, "calls", among=((calls["kind"] == "op") & (calls["inputs"] != "")).to_numpy())
    rows = np.flatnonzero(selected)
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
    """For each row of `trace.calls`, the time of the GPU operations that this operator, or an operator in it, launched.

    0 for other calls.
    """
    operator = operator_of(trace)
    lasted = (trace.operations["end_ns"] - trace.operations["start_ns"]).to_numpy()
    spent = np.bincount(operator[operator != NONE], lasted[operator != NONE], minlength=len(trace.calls)).astype(
        np.int64
    )
    operators = np.flatnonzero((trace.calls["kind"] == "op").to_numpy())
    (line,) = on_one_line([trace.calls.iloc[operators]])
    parent, level = parents(line)
    for at in np.argsort(-level, kind="stable").tolist():
        if parent[at] != NONE:
            spent[operators[parent[at]]] += spent[operators[at]]
    return spent


def write_replay(trace: Trace, op: str, output: Path, selection: Selection = EVERYTHING, *, nth: int = 1) -> Path:
    """Writes a script that replays the operator `op`, and returns `output`.

    The inputs are the recorded ones that took the most time, or the n-th most. TraceError: the operator is not in the
    trace, or its inputs were not recorded.
    """
    table, output = replayable(trace, selection), expanded(output)
    if table.empty:
        raise TraceError(
            "got a trace without inputs of operators; record them: torch.profiler.profile(record_shapes=True)"
        )
    matching = table[(table["name"] == op) | (table["name"] == f"aten::{op}")].reset_index(drop=True)
    if matching.empty:
        most = ", ".join(dict.fromkeys(table["name"].head(8)))
        suggestion = did_you_mean(op, table["name"].unique())
        raise TraceError(f"got the operator {op!r}{suggestion}, expected one with recorded inputs, such as {most}")
    if not 1 <= nth <= len(matching):
        raise TraceError(
            f"got {nth} as the place of the inputs, expected 1 to {len(matching)}, the number of inputs of {op}"
        )
    device = str(trace.devices["name"].iloc[0]) if len(trace.devices) else "a GPU"
    write_whole(output, replay_script(matching.iloc[nth - 1].to_dict(), trace.source.files, device))
    return output


def replay_script(row: Mapping[str, Any], files: tuple[str, ...], device: str) -> str:
    """The script for a row of `replayable`. `files`, `device`: the trace's files and GPU."""
    recorded, work, inputs = json.loads(row["inputs"]), operator_work(row["name"], row["inputs"]), parsed(row["inputs"])
    call = {
        "name": row["name"],
        "dims": _tuples(recorded["dims"]) if inputs else (),
        "types": inputs.types if inputs else (),
        "strides": _tuples(recorded.get("strides") or []),
        "values": inputs.values if inputs else (),
        "traced_us": round(float(row["median_ns"]) / 1e3, 3),
        "traced_on": device if row["on_gpu"] else "the CPU",
        "flops": work.flops if work else 0,
        "bytes": work.bytes if work else 0,
    }
    text = ",\n".join(f"    {name}={_written(value, 6 + len(name))}" for name, value in call.items())
    return SCRIPT.format(
        files=_written(files, len("FILES = ")), count=int(row["count"]), call=f"RecordedCall(\n{text},\n)"
    )


def _tuples(value: object) -> object:
    """Sizes, or lists of sizes, as tuples; () for anything else, which no tensor has."""
    if isinstance(value, list):
        return tuple(_tuples(part) for part in value)
    return value if type(value) is int else ()


def _written(value: object, indent: int) -> str:
    """A value as a literal of Python."""
    return pprint.pformat(value, width=112 - indent).replace("\n", "\n" + " " * indent)
