"""PyTorch's operators by category and shapes, and how close each comes to the GPU's peak."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from labkit.nsys.analysis.containment import NONE, on_one_line, tightest
from labkit.nsys.analysis.intervals import fresh_start_ns
from labkit.nsys.analysis.launches import TIMES, beginnings, first_calls
from labkit.nsys.arrays import Ints, matching
from labkit.nsys.tables.catalogue import OPERATORS
from labkit.nsys.tables.families import operator_family
from labkit.nsys.tables.operator_work import operator_work, parsed
from labkit.nsys.tables.peaks import Peak, peak_of
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.trace import EXPORT_AGAIN, Trace, TraceError

NO_OPERATOR = "(no operator)"
NO_ROOFLINE = "the roofline of this GPU is not known, or no shapes were recorded (record_shapes=True)"
TF32 = re.compile(r"tf32|s1688|tensorop_s", re.IGNORECASE)  # in names of kernels of cuBLAS, CUTLASS and cuDNN
ABOUT = ["category", "shapes", "dtype", "flops", "bytes", "element_bytes"]


def operators(trace: Trace, selection: Selection = EVERYTHING, *, peak: Peak | None = None) -> pd.DataFrame:
    """One row per operator and distinct shapes, the most GPU time first. Its columns:

    - name: the innermost operator around the launches; NO_OPERATOR for kernels without one;
    - category;
    - shapes, dtype: of its tensors; "" if not recorded;
    - count: calls that launched GPU work;
    - kernels: mean number of GPU operations of a call;
    - total_ns: any of its operations ran; share: of all rows' time; median_ns: of a call;
    - flops, bytes: of a call, counted from the shapes (<NA> if unknown);
    - tflop_s, tb_s: reached over total_ns;
    - bound: "compute" or "memory", the one that takes longer at the device's peak;
    - roofline_share: that time / the measured time. More than 100 % of the memory's roofline means that caches held
      part of the data.

    peak: of the device; by default the published peak for its name. TraceError for a trace without operators or without
    GPU operations.
    """
    if not (trace.calls["kind"] == "op").any():
        raise TraceError(
            "got a trace without operators of PyTorch; record with torch.profiler and record_shapes=True, or see "
            "`labkit trace kernels` and `labkit trace ranges`"
        )
    if not trace.on_gpu:
        if not_read := trace.source.not_read:
            raise TraceError(f"got {not_read}, and no other that gives operators their times; {EXPORT_AGAIN}")
        raise TraceError(
            "got a trace without GPU operations, which give operators their times; `labkit trace calls` has their "
            "times on the CPU"
        )
    rows = _launched(trace, selection)
    groups = rows.groupby("call", sort=False)
    by_call = groups.agg(
        name=("name", "first"),
        inputs=("inputs", "first"),
        time_ns=("fresh_ns", "sum"),
        kernels=("fresh_ns", "size"),
        tf32=("tf32", "any"),
    )
    table = by_call.groupby(["name", "inputs"]).agg(
        count=("time_ns", "size"),
        kernels=("kernels", "mean"),
        total_ns=("time_ns", "sum"),
        median_ns=("time_ns", "median"),
        tf32=("tf32", "any"),
    )
    table["share"] = table["total_ns"] / max(int(table["total_ns"].sum()), 1)
    table = table.reset_index()
    facts = [_about(name, inputs) for name, inputs in zip(table["name"], table["inputs"], strict=True)]
    table = table.join(pd.DataFrame(facts, columns=ABOUT, index=table.index))
    device = trace.devices["name"].astype("str").iloc[0] if len(trace.devices) else ""
    table = _against_roofline(table, peak or peak_of(device))
    return table.sort_values("total_ns", ascending=False)[list(OPERATORS.columns)].reset_index(drop=True)


def operator_tables(trace: Trace, selection: Selection) -> tuple[dict[str, pd.DataFrame], tuple[str, ...]]:
    """The tables of `labkit trace operators`, and a remark if there is no roofline."""
    frame = operators(trace, selection)
    has_roofline = frame["roofline_share"].notna().any()
    return {"categories": categories(frame), "operators": frame}, () if has_roofline else (NO_ROOFLINE,)


def categories(by_shapes: pd.DataFrame) -> pd.DataFrame:
    """`by_shapes`, the frame of `operators`, summed by category: category, count, total_ns, share."""
    groups = by_shapes.groupby("category")
    table = groups.agg(count=("count", "sum"), total_ns=("total_ns", "sum"), share=("share", "sum"))
    return table.reset_index().sort_values("total_ns", ascending=False, ignore_index=True)


def operator_of(trace: Trace) -> Ints:
    """For each GPU operation the row in `trace.calls` of the operator that launched it, or NONE.

    This is the innermost operator around the launch. If no operator of the thread is around it, or the launch was not
    recorded, it is the operator that the profiler names.
    """
    operators = np.flatnonzero((trace.calls["kind"] == "op").to_numpy())
    call = first_calls(trace)
    launched = call != NONE
    rows = np.full(len(trace.operations), NONE)
    if not len(operators):
        return rows
    launched_at = beginnings(trace.calls.iloc[call[launched]])
    inner = tightest(*on_one_line([trace.calls.iloc[operators][TIMES], launched_at]))
    rows[launched] = np.append(operators, NONE)[inner]
    numbered = trace.calls.iloc[operators].reset_index()[["index", "process", "external"]]
    numbered = numbered[(numbered["external"] != 0).to_numpy()].drop_duplicates(["process", "external"])
    unresolved = np.flatnonzero((rows == NONE) & (trace.operations["external"] != 0).to_numpy())
    named = trace.operations.iloc[unresolved][["process", "external"]].merge(numbered, how="left")
    rows[unresolved] = named["index"].fillna(NONE).to_numpy(np.int64)
    return rows


def _launched(trace: Trace, selection: Selection) -> pd.DataFrame:
    """One row per GPU operation. Its columns:

    - call: of its operator; without an operator, a negative number of its own;
    - name, inputs, tf32;
    - fresh_ns: the time that it adds to its call.
    """
    selected = selection.of(trace, "operations")
    rows = trace.operations[selected]
    call = operator_of(trace)[selected]
    own = np.where(call == NONE, -1 - np.arange(len(rows)), call)
    names = np.append(np.asarray(trace.calls["name"].astype(str), object), NO_OPERATOR)[call]
    inputs = np.append(np.asarray(trace.calls["inputs"].astype(str), object), "")[call]
    start, end = (rows[name].to_numpy() for name in ("start_ns", "end_ns"))
    return pd.DataFrame(
        {
            "call": own,
            "name": names,
            "inputs": inputs,
            "fresh_ns": end - fresh_start_ns(start, np.maximum(start, end), own),
            "tf32": matching(rows["name"], TF32),
        }
    )


def _about(name: str, inputs: str) -> dict[str, object]:
    arguments, work = parsed(inputs), operator_work(name, inputs)
    tensors = [at for at in range(len(arguments.dims)) if arguments.is_tensor(at)] if arguments else []
    types = dict.fromkeys(arguments.types[at].removeprefix("c10::") for at in tensors) if arguments else {}
    return {
        "category": "no operator" if name == NO_OPERATOR else operator_family(name),
        "shapes": ", ".join("x".join(map(str, arguments.dims[at])) for at in tensors) if arguments else "",
        "dtype": ", ".join(types),
        "flops": work.flops if work and work.flops else pd.NA,
        "bytes": work.bytes if work and work.bytes else pd.NA,
        "element_bytes": work.element_bytes if work else 0,
    }


def _against_roofline(table: pd.DataFrame, peak: Peak | None) -> pd.DataFrame:
    took = table["total_ns"].clip(lower=1)
    flops, moved = (table[name].astype("Float64") * table["count"] for name in ("flops", "bytes"))
    table = table.assign(
        flops=table["flops"].astype("Int64"), bytes=table["bytes"].astype("Int64"),
        tflop_s=flops / took / 1e3, tb_s=moved / took / 1e3, bound="", roofline_share=pd.NA,
    )  # fmt: skip
    if peak is None:
        return table.astype({"roofline_share": "Float64"})
    rate = [peak.tflop_s(*pair) for pair in zip(table["element_bytes"], table["tf32"], strict=True)]
    computing = (flops / 1e3 / pd.Series(rate, table.index).where(lambda rates: rates > 0)).fillna(0.0)
    moving = (moved / 1e3 / peak.tb_s).fillna(0.0)
    longest = np.maximum(computing, moving)
    counted = longest > 0
    table["bound"] = np.where(computing >= moving, "compute", "memory")
    table.loc[~counted, "bound"] = ""
    table["roofline_share"] = (longest / took).astype("Float64").where(counted)
    return table
