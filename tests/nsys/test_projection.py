"""Work of ranges agrees with a comparison of every range, call and operation; also cases that nsys leaves open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.sweeps import swept
from helpers.traces.nsys_databases import random_database
from helpers.traces.nsys_exports import GENERATIONS, START_END, Export, global_pid, global_tid

from labkit.nsys.analysis.projection import kernel_summary, project, projection_summary
from labkit.nsys.reader.reading import read
from labkit.nsys.trace import Source, Trace

PID, TID = global_pid(77), global_tid(77, 78)


def opened(export: Export, folder: Path) -> Trace:
    return read(export.write(folder / "made.sqlite"), cache=False)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("seed", swept(range(8), ["0", "5"]))
def test_a_range_has_the_work_of_all_calls_within_it(seed: int, generation: str, tmp_path: Path) -> None:
    trace = read(random_database(tmp_path / "random.sqlite", 900 + seed, generation), cache=False)
    expected = {}
    launched = trace.operations[(trace.operations["kind"] != "graph") & (trace.operations["correlation"] != 0)]
    work = launched.merge(trace.calls, on=["process", "correlation"], suffixes=("", "_call"))
    for row, interval in enumerate(trace.ranges.itertuples()):
        inside = work[(work["process"] == interval.process) & (work["tid"] == interval.tid)]
        inside = inside[(inside["start_ns_call"] >= interval.start_ns) & (inside["end_ns_call"] <= interval.end_ns)]
        if len(inside):
            start = inside["start_ns"].min()
            expected[row] = (start, inside["end_ns"].max() - start, inside["correlation"].nunique())
    if not trace.on_gpu:
        pytest.skip("this one has no GPU work")
    projected = project(trace).set_index("range")[["start_ns", "duration_ns", "operations"]]
    assert {
        row: tuple(values) for row, values in zip(projected.index, projected.to_numpy().tolist(), strict=True)
    } == expected


def test_level_children_and_parent_speak_of_enclosing_ranges(tmp_path: Path) -> None:
    export = Export()
    export.create(0, TID, 1, "labkit")
    export.range(10, 100, TID, text="outside")
    export.labelled(20, 90, TID, "decode/step")
    export.labelled(30, 40, TID, "decode/embed")
    export.labelled(50, 60, TID, "decode/sample")  # this range launches nothing
    export.call(31, 32, TID, 1)
    export.call(33, 34, TID, 2)
    export.kernel(200, 240, PID, 1)
    export.kernel(210, 300, PID, 2)
    rows = project(opened(export, tmp_path)).sort_values("level")
    assert rows["name"].tolist() == ["outside", "labkit:decode/step", "labkit:decode/embed"]
    assert rows["children"].tolist() == [1, 1, 0]
    assert rows["parent_id"].tolist() == [0, 2, 3]
    assert rows["operations"].tolist() == [2, 2, 2]
    assert (rows["start_ns"] == 200).all()
    assert (rows["duration_ns"] == 100).all()
    assert rows[["pid", "tid"]].drop_duplicates().to_numpy().tolist() == [[77, 78]]


def test_ranges_with_the_same_bounds_keep_their_levels(tmp_path: Path) -> None:
    """nsys takes each for the parent of the other one, and gives neither a level."""
    export = Export()
    for text in ("first", "second"):
        export.range(10, 100, TID, text=text, eventType=START_END)
    export.call(20, 30, TID, 1)
    export.kernel(40, 50, PID, 1)
    rows = project(opened(export, tmp_path)).sort_values("range_id")
    assert rows["level"].tolist() == [0, 1]
    assert rows["parent_id"].tolist() == [0, 1]
    assert rows["children"].tolist() == [1, 0]


def test_correlations_of_two_processes_do_not_mix(tmp_path: Path) -> None:
    export = Export()
    for pid in (77, 99):
        export.range(10, 100, global_tid(pid, 78), text=f"of {pid}")
        export.call(20, 30, global_tid(pid, 78), 1)
        export.kernel(pid * 100, pid * 100 + 5, global_pid(pid), 1)
    rows = project(opened(export, tmp_path)).set_index("name")["start_ns"]
    assert rows.to_dict() == {"of 77": 7700, "of 99": 9900}


def test_calls_of_one_correlation_count_once(tmp_path: Path) -> None:
    """A runtime call and its driver call may share a correlation, and so may calls in a row."""
    export = Export()
    export.range(0, 100, TID, text="both")
    export.range(12, 60, TID, text="inner one", eventType=START_END)
    export.call(10, 40, TID, 1)
    export.call(15, 30, TID, 1, "cuLaunchKernel")
    export.call(50, 55, TID, 1)
    export.call(61, 62, TID, 2)
    export.kernel(200, 210, PID, 1)
    export.kernel(220, 230, PID, 2)
    rows = project(opened(export, tmp_path)).set_index("name")["operations"]
    assert rows.to_dict() == {"both": 2, "inner one": 1}


def test_graphs_traced_as_a_whole_count_only_when_asked(tmp_path: Path) -> None:
    export = Export("2026.1")
    export.range(0, 100, TID, text="replay")
    export.call(10, 20, TID, 1, "cudaGraphLaunch_v10000")
    export.graph(30, 90, PID, 1)
    trace = opened(export, tmp_path)
    assert project(trace).empty  # the same as in nsys
    assert project(trace, graphs=True)[["start_ns", "duration_ns", "operations"]].to_numpy().tolist() == [[30, 60, 1]]


def test_without_a_gpu_ranges_are_projected_on_the_cpu(tmp_path: Path) -> None:
    export = Export()
    export.range(10, 100, TID, text="step")
    export.range(20, 30, TID, text="stage")
    rows = project(opened(export, tmp_path))
    assert rows["name"].tolist() == ["step", "stage"]
    assert rows[["start_ns", "duration_ns"]].to_numpy().tolist() == [[10, 90], [20, 10]]
    assert rows["operations"].tolist() == [0, 0]
    assert rows["children"].tolist() == [1, 0]


def test_kernels_outside_ranges_and_without_calls_are_summarised_too(tmp_path: Path) -> None:
    export = Export()
    export.range(10, 100, TID, text="step")
    export.range(20, 90, TID, text="step")
    for correlation, start in enumerate((30, 40, 200), 1):
        export.call(start, start + 1, TID, correlation)
    for correlation in (1, 2, 3, 4):
        export.kernel(300 * correlation, 300 * correlation + 10 * correlation, PID, correlation)
    table = kernel_summary(opened(export, tmp_path))
    assert table["range"].tolist() == ["", "", "step"]
    assert table["pid"].tolist() == [-1, 77, 77]
    assert table[["instances", "kernels", "total_ns"]].to_numpy().tolist() == [[0, 1, 40], [0, 1, 30], [2, 2, 60]]
    assert table["med_ns"].tolist() == [40, 30, 15]


def test_a_trace_with_ranges_or_kernels_alone_has_no_work_of_ranges(tmp_path: Path) -> None:
    kernels = Export()
    kernels.kernel(10, 20, PID, 1)
    trace = opened(kernels, tmp_path)
    assert project(trace).empty
    assert projection_summary(trace).empty
    assert len(kernel_summary(trace)) == 1
    nothing = Trace(Source("nsys", "", ()))
    assert project(nothing).columns.tolist() == project(trace).columns.tolist()
    assert kernel_summary(nothing).empty


def test_nothing_depends_on_the_order_of_rows(tmp_path: Path) -> None:
    trace = read(random_database(tmp_path / "random.sqlite", 5, "2022.4"), cache=False)
    random = np.random.default_rng(0)
    shuffled = {
        name: frame.iloc[random.permutation(len(frame))].reset_index(drop=True)
        for name, frame in trace.frames.items()
        if name in ("operations", "calls", "ranges")
    }
    in_order, reordered = project(trace), project(replace(trace, **shuffled))
    key = ["range_id"]
    left, right = (rows.drop(columns="range").sort_values(key, ignore_index=True) for rows in (in_order, reordered))
    pd.testing.assert_frame_equal(left, right, check_categorical=False)
