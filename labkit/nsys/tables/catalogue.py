"""Catalogue of the trace tables: their columns, the functions that make them, and the commands that show them.

`labkit trace`, its `--sort`, its JSON and CSV, the page docs/traces.md and the frames follow from the rows below. The
catalogue imports nothing, because the command line begins here.
"""

from __future__ import annotations

from dataclasses import dataclass

NSYS = "Reports of nsys stats, by its names"
TITLES = {  # titles of columns whose names do not say it
    "bytes": "moved",
    "gb_s": "GB/s",
    "roofline_share": "roof",
    "idle_ns": "idle before",
    "bus_gb_s": "bus GB/s",
    "algorithm_gb_s": "algorithm GB/s",
    "change": "of A",
    "a_count": "count A",
    "b_count": "count B",
    "a_ns": "A",
    "b_ns": "B",
    "difference_ns": "B - A",
    "a_unit_ns": "A each",
    "b_unit_ns": "B each",
    "unit_difference_ns": "B - A",
    "unit_change": "of A",
    "wait_ns": "waited",
    "exchange_ns": "exchanging",
    "offset_ns": "clock set by",
    "residual_ns": "known to",
    "tb_s": "TB/s",
    "tflop_s": "TFLOP/s",
    "p95_ns": "P95",
    "avg_ns": "average",
    "span_ns": "span",
    "range_total_ns": "on the CPU",
    "busy_share": "GPU busy",
    "exposed_communication_share": "comm. alone",
    "exposed_copy_share": "copies alone",
}
UNITS = {  # by the end of a column's name
    **dict.fromkeys(("_ns", " (ns)"), "ns"),
    **dict.fromkeys(("share", "hidden", "change"), "share"),
    " (%)": "%",
    "gb_s": "GB/s",
    "tb_s": "TB/s",
    "tflop_s": "TFLOP/s",
    "bytes": "bytes",
    "flops": "FLOP",
}


@dataclass(frozen=True)
class TraceTable:
    """A table of a trace."""

    name: str  # its key in JSON, its file's name in Parquet, and TABLE in `--sort TABLE.COLUMN`
    title: str  # the heading above it
    columns: tuple[str, ...]  # of its frame, in order; a name ends with its unit (`unit_of`)
    shown: tuple[str, ...]  # columns in a terminal and in Markdown
    kernels: tuple[str, ...] = ()  # columns whose kernel names are shortened for people
    sentence: str = ""  # "module:function" that makes a sentence of a row, which people see instead of the columns
    of_ranks: bool = False  # rows are about ranks, so the rank is shown even if there is only one


@dataclass(frozen=True)
class TraceCommand:
    """A command of `labkit trace` that shows tables."""

    name: str
    help: str  # one sentence
    function: str  # "module:function" in `labkit.nsys.tables`, see `labkit.nsys.trace_tables`
    tables: tuple[TraceTable, ...]
    needs: str = ""  # what the trace must have recorded; "": any trace has it
    panel: str = ""  # a heading of its own in `labkit trace --help`


def unit_of(column: str) -> str:
    """The unit of a column by the end of its name; "" for texts, counts and numbers of things."""
    return next((unit for end, unit in UNITS.items() if column.endswith(end)), "")


SPREAD = ("count", "total_ns", "share", "avg_ns", "median_ns", "p95_ns", "min_ns", "max_ns")
TIMES = ("count", "total_ns", "share", "median_ns", "p95_ns")
SUMS = ("Time (%)", "Total Time (ns)", "Med (ns)")
NSYS_SPREAD = ("Avg (ns)", "Med (ns)", "Min (ns)", "Max (ns)", "StdDev (ns)")
PARTS = ("busy", "compute", "exposed_communication", "exposed_copy", "idle")  # of a device's time

CONTENTS = TraceTable(
    "contents",
    "Contents",
    columns=("what", "process", "rank", "count", "start_ns", "end_ns"),
    shown=("rank", "what", "count", "start_ns", "end_ns"),
)
BUDGET = TraceTable(
    "budget",
    "Where the GPU's time goes",
    columns=(
        *("rank", "process", "device", "name", "operations", "start_ns", "span_ns"),
        *(f"{part}_ns" for part in PARTS),
        *("communication_ns", "copy_ns", "communication_hidden", "copy_hidden", "graphs", "graphs_unseen"),
        *(f"{part}_share" for part in PARTS),
    ),
    shown=("rank", "device", "span_ns", *(f"{part}_share" for part in PARTS)),
)
IDLE = TraceTable(
    "idle",
    "What the idle GPU waited for",
    columns=("rank", "device", "cause", "gaps", "time_ns", "share"),
    shown=("rank", "device", "cause", "gaps", "time_ns", "share"),
)
KERNELS = TraceTable("kernels", "Kernels", columns=("name", *SPREAD), shown=("name", *TIMES), kernels=("name",))
COPIES = TraceTable(
    "copies",
    "Copies and memsets",
    columns=("name", "memory", "size", *SPREAD, "bytes", "gb_s"),
    shown=("name", "memory", "size", "count", "bytes", "total_ns", "gb_s"),
)
CALLS = TraceTable("calls", "Calls on the CPU", columns=("library", "name", *SPREAD), shown=("library", "name", *TIMES))
RANGES = TraceTable(
    "ranges",
    "Ranges",
    columns=("name", *SPREAD, "range_total_ns", "operations", "busy_share"),
    shown=("name", "count", "total_ns", "median_ns", "operations", "busy_share"),
)
GAPS = TraceTable(
    "gaps",
    "Gaps",
    columns=(
        *("rank", "device", "start_ns", "time_ns", "cause", "awaited", "host_cause", "host_ns", "launch_ns"),
        *("latency_ns", "queued_ns", "unknown_ns", "before", "next", "stream", "row"),
    ),
    shown=("rank", "start_ns", "time_ns", "cause", "awaited", "next"),
    kernels=("next",),
)
SHORT = TraceTable(
    "short",
    "Short kernels",
    columns=("name", "count", "total_ns", "median_ns", "idle_ns", "share"),
    shown=("name", "count", "median_ns", "total_ns", "idle_ns", "share"),
    kernels=("name",),
)
LOSSES = TraceTable(
    "losses",
    "What could be gained at most",
    columns=("loss", "rank", "device", "gpu", "time_ns", "share", "evidence", "start_ns", "end_ns", "helps"),
    shown=("loss",),
    sentence="losses:sentence",
)
PROJECTION = TraceTable(
    "projection",
    "Ranges on the GPU",
    columns=(
        *("name", "start_ns", "duration_ns", "range_start_ns", "range_duration_ns", "style", "process", "pid", "tid"),
        *("operations", "level", "children", "range_id", "parent_id", "range", "rank", "busy_ns"),
    ),
    shown=("rank", "name", "start_ns", "duration_ns", "operations", "level"),
)
CATEGORIES = TraceTable(
    "categories",
    "Operators of PyTorch by what they do",
    columns=("category", "count", "total_ns", "share"),
    shown=("category", "count", "total_ns", "share"),
)
OPERATORS = TraceTable(
    "operators",
    "Operators by shapes",
    columns=(
        *("name", "category", "shapes", "dtype", "count", "kernels", "total_ns", "share", "median_ns", "flops"),
        *("bytes", "tflop_s", "tb_s", "bound", "roofline_share"),
    ),
    shown=("name", "shapes", "count", "total_ns", "share", "tflop_s", "tb_s", "roofline_share"),
)
RANKS = TraceTable(
    "ranks",
    "Ranks",
    columns=(
        *("rank", "collectives", "last", "wait_ns", "exchange_ns"),
        *("offset_ns", "low_ns", "high_ns", "residual_ns"),
    ),
    shown=("rank", "collectives", "last", "wait_ns", "exchange_ns", "offset_ns", "residual_ns"),
)
STRAGGLERS = TraceTable(
    "stragglers",
    "Who came late, and where",
    columns=("rank", "range", "times", "late_ns", "median_ns"),
    shown=("rank", "range", "times", "late_ns", "median_ns"),
    of_ranks=True,
)
COLLECTIVES = TraceTable(
    "collectives",
    "Collectives",
    columns=(
        *("start_ns", "kind", "group", "ranks", "bytes", "skew_ns", "transfer_ns", "algorithm_gb_s", "bus_gb_s"),
        *("last", "range", "match"),
    ),
    shown=("start_ns", "kind", "bytes", "skew_ns", "transfer_ns", "bus_gb_s", "last", "range"),
)
DIFFERENCE = ("name", "a_count", "b_count", "a_ns", "b_ns", "difference_ns", "change")
UNIT_TIMES = ("a_unit_ns", "b_unit_ns", "unit_difference_ns", "unit_change")  # only if both sides repeat a unit
BY_UNIT = ("name", "a_count", "b_count", *UNIT_TIMES)  # shown if the sides repeat it a different number of times
OF_RANGES = TraceTable("of ranges", "The difference by ranges", columns=(*DIFFERENCE, *UNIT_TIMES), shown=DIFFERENCE)
OF_KERNELS = TraceTable("of kernels", "The difference by kernels", columns=(*DIFFERENCE, *UNIT_TIMES), shown=DIFFERENCE)
COMPARED = (OF_RANGES, OF_KERNELS)  # of `labkit trace compare`


def _summed(name: str, title: str, count: str, of: str, kernels: tuple[str, ...] = ()) -> TraceTable:
    """A table of nsys that sums times by a name."""
    columns = ("Time (%)", "Total Time (ns)", count, *NSYS_SPREAD, of)
    return TraceTable(name, title, columns, shown=(*SUMS, count, of), kernels=kernels)


NVTX_GPU_PROJ_TRACE = TraceTable(
    "nvtx_gpu_proj_trace",
    "Ranges on the GPU",
    columns=(
        *("Name", "Projected Start (ns)", "Projected Duration (ns)", "Orig Start (ns)", "Orig Duration (ns)", "Style"),
        *("PID", "TID", "NumGPUOps", "Lvl", "NumChild", "RangeId", "ParentId", "RangeStack"),
    ),
    shown=("Name", "Projected Start (ns)", "Projected Duration (ns)", "NumGPUOps", "Lvl"),
)
NVTX_GPU_PROJ_SUM = TraceTable(
    "nvtx_gpu_proj_sum",
    "Ranges by name",
    columns=(
        *("Range", "Style", "Total Proj Time (ns)", "Total Range Time (ns)", "Range Instances"),
        *(f"Proj {column}" for column in NSYS_SPREAD),
        *("Total GPU Ops", "Avg GPU Ops", "Avg Range Lvl", "Avg Num Child"),
    ),
    shown=("Range", "Total Proj Time (ns)", "Range Instances", "Proj Med (ns)", "Total GPU Ops"),
)
NVTX_KERN_SUM = TraceTable(
    "nvtx_kern_sum",
    "Kernels of ranges",
    columns=(
        *("NVTX Range", "Style", "PID", "TID", "NVTX Inst", "Kern Inst", "Total Time (ns)", *NSYS_SPREAD),
        "Kernel Name",
    ),
    shown=("NVTX Range", "Kern Inst", "Total Time (ns)", "Med (ns)", "Kernel Name"),
    kernels=("Kernel Name",),
)
OF_NSYS = (
    NVTX_GPU_PROJ_TRACE,
    NVTX_GPU_PROJ_SUM,
    NVTX_KERN_SUM,
    _summed("cuda_gpu_kern_sum", "Kernels by name", "Instances", "Name", kernels=("Name",)),
    _summed("cuda_gpu_mem_time_sum", "Copies and memsets by kind", "Count", "Operation"),
    _summed("cuda_api_sum", "Calls of CUDA by name", "Num Calls", "Name"),
    _summed("osrt_sum", "Calls of the system's libraries by name", "Num Calls", "Name"),
)
SUMMARY = (CONTENTS, BUDGET, IDLE, KERNELS, COPIES, CALLS, RANGES, LOSSES)
COMMANDS = {
    command.name: command
    for command in (
        TraceCommand("summary", "Show what a trace contains and where its time goes.", "summary:summarise", SUMMARY),
        TraceCommand(
            "collectives",
            "List the collectives of the ranks: last rank, waiting time, bandwidth.",
            "rank_waits:rank_tables",
            (RANKS, STRAGGLERS, COLLECTIVES),
            needs="traces of two or more ranks",
        ),
        TraceCommand(
            "operators",
            "List PyTorch's operators by shapes: time, TFLOP/s, TB/s, share of the roofline.",
            "operators:operator_tables",
            (CATEGORIES, OPERATORS),
            needs="torch.profiler with `record_shapes=True`, a GPU",
        ),
        TraceCommand("kernels", "List kernels by name: number and time.", "operations:kernels", (KERNELS,), "a GPU"),
        TraceCommand(
            "ranges",
            "List ranges by name: time on the GPU, and how busy it was.",
            "ranges:ranges",
            (RANGES,),
            needs="ranges",
        ),
        TraceCommand(
            "copies",
            "List copies and memsets by kind, memory and size: number and rate.",
            "operations:copies",
            (COPIES,),
            needs="a GPU",
        ),
        TraceCommand(
            "calls",
            "List calls on the CPU: CUDA, operators of PyTorch, the system's libraries.",
            "operations:calls",
            (CALLS,),
        ),
        TraceCommand(
            "gaps", "List the times when the GPU was idle, and what it waited for.", "gaps:gaps", (GAPS,), "a GPU"
        ),
        TraceCommand(
            "short",
            "List kernels below 10 µs, with the idle time before them.",
            "gaps:short_kernels",
            (SHORT,),
            needs="a GPU",
        ),
        TraceCommand(
            "projection", "List every range with its time on the GPU.", "ranges:projection", (PROJECTION,), "ranges"
        ),
        *(
            TraceCommand(
                table.name,
                f"{table.title}, with the columns and rows of nsys.",
                f"nsys_reports:{table.name}",
                (table,),
                panel=NSYS,
            )
            for table in OF_NSYS
        ),
    )
}
