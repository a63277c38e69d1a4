"""Reports under nsys's own names: the rows of the installed nsys, and the columns of newer versions."""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from pathlib import Path

import pandas as pd
import pytest
from helpers.nsys.nsight import NSYS, needs_nsys
from helpers.nsys.nsys_stats import sums
from helpers.traces.nsys_databases import random_database
from helpers.traces.nsys_exports import Export, global_pid, global_tid

from labkit.nsys.reader.reading import read
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.tables.trace_tables import trace_tables
from labkit.nsys.trace import Trace

PID, TID = global_pid(77), global_tid(77, 78)
COUNTED = {"cuda_gpu_kern_sum": "Instances", "cuda_gpu_mem_time_sum": "Count"}  # in other reports: "Num Calls"
NAMED = {"cuda_gpu_mem_time_sum": "Operation"}  # in other reports: "Name"
OLD_COPY = re.compile(r"\b([HDP])to([HDP])\b")
WORDS = {"H": "Host", "D": "Device", "P": "Peer"}
Sums = dict[str, tuple[int, int, int, int]]


def exported(path: Path, seed: int) -> Path:
    """A random export, with calls of the system's libraries."""
    random_database(path, seed, "2022.4", settled=True)
    export = Export()
    for index, name in enumerate(("poll", "read", "poll", "sem_wait")):
        export.os(1000 * index, 1000 * index + 10 * (index + 1), TID, name)
    other = export.write(path.with_name("os.sqlite"))
    with sqlite3.connect(path) as database:
        database.execute("ATTACH ? AS other", (str(other),))
        database.execute("CREATE TABLE OSRT_API AS SELECT * FROM other.OSRT_API")
        database.execute("UPDATE OSRT_API SET nameId = nameId + 100000")
        database.execute("INSERT INTO StringIds SELECT id + 100000, value FROM other.StringIds")
    return path


def of_nsys(report: str, rows: list[dict[str, object]]) -> Sums:
    """Total, count, least and most by name.

    nsys 2022.4 has a row for each size of a kernel and each version of a call; these rows are added up.
    """
    by_name: Sums = defaultdict(lambda: (0, 0, 1 << 62, 0))
    for row in rows:
        name = re.sub(r"_v\d{4,5}$", "", str(row[NAMED.get(report, "Name")]))
        name = OLD_COPY.sub(lambda kind: f"{WORDS[kind[1]]}-to-{WORDS[kind[2]]}", name)
        values = [
            int(str(row[key])) for key in ("Total Time (ns)", COUNTED.get(report, "Num Calls"), "Min (ns)", "Max (ns)")
        ]
        total, count, least, most = by_name[name]
        by_name[name] = (total + values[0], count + values[1], min(least, values[2]), max(most, values[3]))
    return dict(by_name)


def frame_of(report: str, trace: Trace, selection: Selection = EVERYTHING) -> pd.DataFrame:
    return trace_tables(trace, report, selection).frames[report]


def of_labkit(report: str, trace: Trace) -> Sums:
    return of_nsys(report, frame_of(report, trace).to_dict("records"))


@needs_nsys
@pytest.mark.parametrize("seed", range(2))
def test_sums_are_those_of_nsys(seed: int, tmp_path: Path) -> None:
    assert NSYS is not None
    path = exported(tmp_path / "random.sqlite", seed)
    nsys_sums, trace = sums(NSYS, path), read(path, cache=False)
    for report, rows in nsys_sums.items():
        assert of_labkit(report, trace) == of_nsys(report, rows), report
        if report != "cuda_gpu_kern_sum":
            report_of_labkit = frame_of(report, trace)
            assert sorted(report_of_labkit["Time (%)"]) == pytest.approx(
                sorted(float(str(row["Time (%)"])) for row in rows), abs=0.11
            )
    assert len(nsys_sums["osrt_sum"]) == 3


def test_columns_are_those_of_nsys_from_2023_on(tmp_path: Path) -> None:
    trace = read(exported(tmp_path / "random.sqlite", 3), cache=False)
    spread = ["Avg (ns)", "Med (ns)", "Min (ns)", "Max (ns)", "StdDev (ns)"]
    for report, counted, named in (
        ("cuda_gpu_kern_sum", "Instances", "Name"),
        ("cuda_gpu_mem_time_sum", "Count", "Operation"),
        ("cuda_api_sum", "Num Calls", "Name"),
        ("osrt_sum", "Num Calls", "Name"),
    ):
        assert list(frame_of(report, trace)) == ["Time (%)", "Total Time (ns)", counted, *spread, named]
    kernels = frame_of("nvtx_kern_sum", trace)
    assert list(kernels) == [
        *("NVTX Range", "Style", "PID", "TID", "NVTX Inst", "Kern Inst", "Total Time (ns)", *spread, "Kernel Name")
    ]
    projected = frame_of("nvtx_gpu_proj_sum", trace)
    assert list(projected)[:5] == ["Range", "Style", "Total Proj Time (ns)", "Total Range Time (ns)", "Range Instances"]


def test_a_range_names_those_around_it(tmp_path: Path) -> None:
    export = Export()
    for start, text in ((10, "outer"), (20, "inner")):
        export.range(start, 100 - start, TID, text=text)
    export.call(30, 40, TID, 1)
    export.kernel(50, 60, PID, 1)
    rows = frame_of("nvtx_gpu_proj_trace", read(export.write(tmp_path / "made.sqlite"), cache=False))
    assert dict(zip(rows["Name"], rows["RangeStack"], strict=True)) == {"outer": ":1", "inner": ":1:2"}


def test_filters_hold_for_reports_too(tmp_path: Path) -> None:
    trace = read(exported(tmp_path / "random.sqlite", 3), cache=False)
    rows = frame_of("cuda_gpu_kern_sum", trace, Selection(name="gemm"))
    assert rows["Name"].str.contains("gemm").all()
    assert rows["Time (%)"].tolist() == [100.0]
    projected: pd.DataFrame = frame_of("nvtx_gpu_proj_sum", trace, Selection(name="forward"))
    assert projected["Range"].str.contains("forward").all()
