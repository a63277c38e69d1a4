"""The reports of `nsys stats` by nsys's own names, with the columns and rows of versions from 2023 on.

Shares are of the listed rows, as in nsys. Names of CUDA's runtime calls lack the version at their end; nsys keeps
versions of five digits. labkit.nsys.analysis.projection says where nsys is wrong about levels and parents.
"""

from __future__ import annotations

import pandas as pd

from labkit.nsys.analysis.projection import kernel_summary, project, projection_summary, spread_of
from labkit.nsys.tables.catalogue import NSYS_SPREAD, NVTX_GPU_PROJ_SUM, NVTX_GPU_PROJ_TRACE, NVTX_KERN_SUM, TraceTable
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.trace import Trace

SPREAD = ("avg_ns", "med_ns", "min_ns", "max_ns", "std_ns")
COPY_NAMES = {"H": "Host", "D": "Device", "A": "Array", "P": "Peer"}
# The columns of `labkit.nsys.analysis.projection` that the reports show under nsys's names, in nsys's order.
PROJECTION = (
    *("name", "start_ns", "duration_ns", "range_start_ns", "range_duration_ns", "style", "pid", "tid", "operations"),
    *("level", "children", "range_id", "parent_id", "stack"),
)
PROJECTION_SUM = (
    *("name", "style", "total_ns", "range_total_ns", "instances", *SPREAD),
    *("operations", "avg_operations", "avg_level", "avg_children"),
)
KERNELS_OF_RANGES = ("range", "style", "pid", "tid", "instances", "kernels", "total_ns", *SPREAD, "kernel")


def nvtx_gpu_proj_trace(trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    """Every range with its time on the GPU."""
    rows = project(trace)
    shown = rows[selection.of(trace, "ranges")[rows["range"].to_numpy()]]
    return _renamed(shown.assign(stack=_stacks(rows).loc[shown.index]), PROJECTION, NVTX_GPU_PROJ_TRACE)


def nvtx_gpu_proj_sum(trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    """Ranges with their time on the GPU, by name and style."""
    rows = projection_summary(trace, among=selection.of(trace, "ranges"))
    return _renamed(rows, PROJECTION_SUM, NVTX_GPU_PROJ_SUM)


def nvtx_kern_sum(trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    """Kernels by the ranges that launched them."""
    is_kernel = (trace.operations["kind"] == "kernel").to_numpy()
    rows = kernel_summary(trace, among=selection.of(trace, "operations", among=is_kernel))
    return _renamed(rows, KERNELS_OF_RANGES, NVTX_KERN_SUM)


def cuda_gpu_kern_sum(trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    """Kernels by name."""
    return _sum(selection.rows(trace, "operations", "kernel"), "Instances", "Name")


def cuda_gpu_mem_time_sum(trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    """Copies and memsets by kind."""
    rows = selection.rows(trace, "operations", "memcpy", "memset")
    names = rows["name"].cat.remove_unused_categories()
    return _sum(rows.assign(name=names.cat.rename_categories(_operation_name)), "Count", "Operation")


def cuda_api_sum(trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    """Calls of CUDA by name."""
    return _sum(selection.rows(trace, "calls", "api"), "Num Calls", "Name")


def osrt_sum(trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    """Calls of the system's libraries by name."""
    return _sum(selection.rows(trace, "calls", "os"), "Num Calls", "Name")


def _sum(rows: pd.DataFrame, count_title: str, name_title: str) -> pd.DataFrame:
    times = (rows["end_ns"] - rows["start_ns"]).groupby(rows["name"], observed=True)
    total = times.sum()
    table = pd.DataFrame(
        {
            "Time (%)": (total * 100 / max(int(total.sum()), 1)).round(1),
            "Total Time (ns)": total,
            count_title: times.size(),
            **{name: column.round(1) for name, column in zip(NSYS_SPREAD, spread_of(times).values(), strict=True)},
        }
    )
    table[name_title] = table.index.astype("str")
    return table.sort_values(["Total Time (ns)", name_title], ascending=[False, True], ignore_index=True)


def _operation_name(name: str) -> str:
    """ "[CUDA memcpy Host-to-Device]" for "HtoD"."""
    kind, _, unified = name.partition(" ")
    ends = kind.split("to")
    if len(ends) == 2 and set(ends) <= COPY_NAMES.keys():
        kind = "-to-".join(COPY_NAMES[end] for end in ends)
        return f"[CUDA memcpy Unified {kind}]" if unified else f"[CUDA memcpy {kind}]"
    return f"[CUDA {name}]" if name == "memset" else f"[CUDA memcpy {name}]"


def _stacks(rows: pd.DataFrame) -> pd.Series:
    """The ids of the ranges around each row, the outermost first, and its own: ":3:7"."""
    parent = dict(zip(zip(rows["process"], rows["range_id"], strict=True), rows["parent_id"], strict=True))
    texts: dict[tuple[int, int], str] = {}

    def stack(process: int, range_id: int) -> str:
        chain = []
        while range_id and (process, range_id) not in texts:
            chain.append(range_id)
            range_id = parent.get((process, range_id), 0)
        text = texts.get((process, range_id), "")
        for link in reversed(chain):
            text = texts[process, link] = f"{text}:{link}"
        return text

    return pd.Series(
        [stack(*key) for key in zip(rows["process"], rows["range_id"], strict=True)], rows.index, dtype="str"
    )


def _renamed(frame: pd.DataFrame, columns: tuple[str, ...], table: TraceTable) -> pd.DataFrame:
    """The columns of a frame under nsys's names, which the catalogue has in the same order."""
    rounded = {name: frame[name].round(1) for name in frame if pd.api.types.is_float_dtype(frame[name])}
    texts = {name: "str" for name in frame if isinstance(frame[name].dtype, pd.CategoricalDtype)}
    names = dict(zip(columns, table.columns, strict=True))
    return frame.assign(**rounded).astype(texts)[list(columns)].rename(columns=names).reset_index(drop=True)
