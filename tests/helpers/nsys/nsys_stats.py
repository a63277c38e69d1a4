"""Rows of nsys's own reports on an export, and the same rows from labkit's frames, in a form that can be compared."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from labkit.nsys.tool import Nsys

Row = tuple[object, ...]
TRACE = {
    "Name": "name",
    "Projected Start (ns)": "start_ns",
    "Projected Duration (ns)": "duration_ns",
    "Orig Start (ns)": "range_start_ns",
    "Orig Duration (ns)": "range_duration_ns",
    "Style": "style",
    "PID": "pid",
    "TID": "tid",
    "NumGPUOps": "operations",
    "Lvl": "level",
    "NumChild": "children",
    "RangeId": "range_id",
    "ParentId": "parent_id",
}
STACK = {
    "Name": "name",
    "Start (ns)": "start_ns",
    "Duration (ns)": "duration_ns",
    "PID": "pid",
    "TID": "tid",
    "Lvl": "level",
    "NumChild": "children",
    "RangeId": "range_id",
    "ParentId": "parent_id",
}
SPREAD = {"Avg": "avg_ns", "Med": "med_ns", "Min": "min_ns", "Max": "max_ns", "StdDev": "std_ns"}
SUMMARY = {
    "Range": "name",
    "Style": "style",
    "Total Proj Time (ns)": "total_ns",
    "Total Range Time (ns)": "range_total_ns",
    "Range Instances": "instances",
    **{f"Proj {name} (ns)": column for name, column in SPREAD.items()},
    "Total GPU Ops": "operations",
    "Avg GPU Ops": "avg_operations",
    "Avg Range Lvl": "avg_level",
    "Avg Num Child": "avg_children",
}
KERNELS = {
    "NVTX Range": "range",
    "Style": "style",
    "PID": "pid",
    "TID": "tid",
    "Kernel Name": "kernel",
    "NVTX Inst": "instances",
    "Kern Inst": "kernels",
    "Total Time (ns)": "total_ns",
    **{f"{name} (ns)": column for name, column in SPREAD.items()},
}
NULL = ("None", "")  # up to 2022, and from 2023 on
NOTHING = {"PID": -1, "TID": -1, "ParentId": 0}  # labkit's value for NULL in nsys; "" in all other columns
IN_TENTHS = {"avg_ns", "med_ns", "std_ns", "avg_operations", "avg_level", "avg_children"}


def is_old(nsys: Nsys) -> bool:
    """Whether this nsys names its reports and ends open ranges like 2022.4."""
    return nsys.version < (2023,)


def reports(nsys: Nsys, database: Path) -> dict[str, list[dict[str, object]]]:
    """Rows of the reports "trace", "summary" (only from 2023 on) and "kernels"; no rows if nsys skips the report."""
    if is_old(nsys):
        return _reports(nsys, database, {"nvtxgpuproj": "trace", "nvtxkernsum": "kernels"})
    names = {"nvtx_gpu_proj_trace": "trace", "nvtx_gpu_proj_sum": "summary", "nvtx_kern_sum": "kernels"}
    return _reports(nsys, database, names)


def stack(nsys: Nsys, database: Path) -> list[dict[str, object]]:
    """Rows of the report on push/pop ranges and how they nest on the CPU."""
    return _reports(nsys, database, {"nvtxpptrace" if is_old(nsys) else "nvtx_pushpop_trace": "stack"})["stack"]


def sums(nsys: Nsys, database: Path) -> dict[str, list[dict[str, object]]]:
    """Rows of the reports that sum up kernels, copies and calls, by the names used from 2023 on."""
    old = {"gpukernsum": "cuda_gpu_kern_sum", "gpumemtimesum": "cuda_gpu_mem_time_sum", "cudaapisum": "cuda_api_sum"}
    old |= {"osrtsum": "osrt_sum"}
    return _reports(nsys, database, old if is_old(nsys) else {name: name for name in old.values()})


def _reports(nsys: Nsys, database: Path, names: dict[str, str]) -> dict[str, list[dict[str, object]]]:
    command = [str(nsys.path), "stats", "--format", "json", "-r", ",".join(names), str(database)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert not process.stderr.strip(), process.stderr
    rows = {}
    for part in process.stdout.split("Processing [")[1:]:
        head, _, body = part.partition("\n")
        text = body.strip()
        name = names[Path(head.split("with [")[1].split("]")[0]).stem]
        rows[name] = [] if text.startswith("SKIPPED") or not text else json.loads(text)
    assert rows.keys() == set(names.values()), process.stdout
    return rows


def rows_of_nsys(rows: Sequence[dict[str, object]], columns: dict[str, str]) -> list[Row]:
    return [
        tuple(
            NOTHING.get(name, "") if row[name] in NULL else _number(row[name], column)
            for name, column in columns.items()
        )
        for row in rows
    ]


def rows_of_labkit(frame: pd.DataFrame, columns: dict[str, str]) -> list[Row]:
    """Rows with the same columns; means and deviations are rounded as nsys rounds them."""
    return [
        tuple(_number(value, column) for column, value in zip(columns.values(), row, strict=True))
        for row in frame[list(columns.values())].itertuples(index=False)
    ]


def _number(value: object, column: str) -> object:
    return float(value) if column in IN_TENTHS else value  # type: ignore[arg-type]
