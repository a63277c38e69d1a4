"""Wrong or missing facts of a trace are remarked, and nothing is concluded from them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.traces.handmade import Recorder
from helpers.traces.nsys_exports import KERNEL, START_END, Export, global_pid, global_tid

from labkit.nsys.analysis.launches import first_calls
from labkit.nsys.analysis.rank_numbers import ranks
from labkit.nsys.reader.reading import read
from labkit.nsys.tables.compare import compare_traces
from labkit.nsys.tables.doubts import doubts
from labkit.nsys.tables.gaps import gaps
from labkit.nsys.tables.losses import HELPS, sentence
from labkit.nsys.tables.operators import NO_OPERATOR, operators
from labkit.nsys.tables.selection import Selection
from labkit.nsys.tables.summary import summarise
from labkit.nsys.trace import Trace, TraceError, typed

PID, TID = global_pid(77), global_tid(77, 78)


def launched(count: int = 6, **columns: Any) -> Recorder:
    """A recorder with `count` operators of one kernel each."""
    recorder = Recorder()
    for index in range(count):
        recorder.operator(f"aten::op{index}", 50 * index, 50 * index + 10)
        recorder.kernel(50 * index + 5, 50 * index + 12, 50 * index + 20, **columns)
    return recorder


@pytest.mark.parametrize("table", ["CUPTI_ACTIVITY_KIND_KERNEL_V3", "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL", KERNEL])
def test_work_that_is_not_read_is_no_idle_time(table: str, tmp_path: Path) -> None:
    """The table of that work has an unknown name, or no times."""
    export = Export()
    for begin in (0, 10_000_000):
        export.call(begin, begin + 10, TID, begin + 1)
        export.copy(begin + 20, begin + 30, PID, begin + 1)
        export.call(begin + 100, begin + 110, TID, begin + 2)
        export.kernel(begin + 120, begin + 9_000_000, PID, begin + 2)
    path = export.write(tmp_path / "odd.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        change = "RENAME COLUMN start TO began" if table == KERNEL else f"RENAME TO {table}"
        connection.execute(f"ALTER TABLE {KERNEL} {change}")
        connection.commit()
    trace = read(path, cache=False)
    assert trace.source.unread_work == (f"2 {table}",)
    assert trace.operations["kind"].tolist() == ["memcpy", "memcpy"]
    summary = summarise(trace)
    assert summary.budget[["idle_ns", "exposed_copy_ns", "copy_hidden"]].isna().all(axis=None)
    assert summary.idle.empty
    assert summary.losses.empty
    assert any(f"not read (2 {table}), so idle time is not known" in line for line in summary.remarks)
    assert not any("no GPU work" in line for line in summary.remarks)
    with pytest.raises(TraceError, match="it is not known when the GPU was idle"):
        gaps(trace)
    assert any("busy time is compared" in line for line in compare_traces(trace, trace).remarks)


def test_work_that_is_not_read_is_named_where_it_is_all_work() -> None:
    trace = launched(3).trace(profiler="torch.profiler")
    table = "3 CUPTI_ACTIVITY_KIND_KERNEL_V3"
    unread = replace(
        trace, operations=trace.operations.iloc[:0], source=replace(trace.source, unread_work=(table,), files=("a.x",))
    )
    (remark,) = summarise(unread).remarks
    assert remark.startswith(f"there is only work of the GPU that is not read ({table}); export the report")
    for analysis in (gaps, operators, lambda trace: compare_traces(trace, trace)):
        with pytest.raises(
            TraceError, match=rf"work of the GPU that is not read \({table}\).*; export the report with"
        ):
            analysis(unread)


def test_a_start_end_range_on_one_thread_is_kept_and_one_on_two_is_named(tmp_path: Path) -> None:
    export = Export()
    export.range(100, 500, TID, text="kept", eventType=START_END, endGlobalTid=TID)
    export.range(100, 500, TID, text="gone", eventType=START_END, endGlobalTid=TID ^ 1)
    trace = read(export.write(tmp_path / "ranges.sqlite"), cache=False)
    assert trace.ranges["name"].tolist() == ["kept"]
    assert Selection(name="kept").of(trace, "ranges").all()
    for selection in (Selection(name="gone"), Selection(range="gone")):
        with pytest.raises(TraceError, match="Not among them: 1 NVTX ranges that ended on another thread"):
            selection.of(trace, "ranges")


def test_a_call_belongs_to_the_operator_that_was_open_when_it_began() -> None:
    """Its end may be rounded past the operator's end. A call that begins as one operator ends belongs to the next."""
    recorder = Recorder()
    for index, late_us in enumerate((0.0, 0.001, 1.0)):
        begin = 100.0 * index
        recorder.operator("aten::outer", begin, begin + 50)
        recorder.operator("aten::inner", begin + 1, begin + 20 - late_us)
        recorder.operator("aten::next", begin + 20, begin + 40)
        recorder.kernel(begin + 19.9 - late_us, begin + 30, begin + 40)
        recorder.kernel(begin + 20, begin + 41, begin + 45)
    trace = recorder.trace(profiler="torch.profiler")
    late = trace.calls["end_ns"].where(trace.calls["kind"] == "op", trace.calls["start_ns"] + 101)
    table = operators(replace(trace, calls=trace.calls.assign(end_ns=late)))
    assert table.set_index("name")["count"].to_dict() == {"aten::inner": 3, "aten::next": 3}


def test_one_correlation_of_all_kernels_names_no_call() -> None:
    trace = launched().trace(profiler="torch.profiler")
    names = trace.calls["name"].cat.rename_categories({"launch": "cudaLaunchKernel"})
    trace = replace(trace, calls=trace.calls.assign(name=names))
    assert operators(trace)["count"].tolist() == [1] * 6
    shared = replace(trace, operations=trace.operations.assign(correlation=1))
    assert (first_calls(shared) == -1).all()
    assert operators(shared)["name"].tolist() == [NO_OPERATOR]
    summary = summarise(shared)
    assert any("6 operations share the correlation" in line for line in summary.remarks)
    assert summary.idle["cause"].tolist() == ["launch not known"]
    (loss,) = summary.losses.to_dict("records")
    assert "their launches cannot be told apart" in loss["helps"]
    unmatched = replace(trace, operations=trace.operations.assign(correlation=0))
    (loss,) = summarise(unmatched).losses.to_dict("records")
    assert loss["helps"] == HELPS["recorded"]
    without_operators = replace(unmatched, calls=trace.calls[(trace.calls["kind"] != "op").to_numpy()])
    assert "record" in summarise(without_operators).losses.iloc[0]["helps"]
    graph = replace(
        shared, calls=shared.calls.assign(name=names.cat.rename_categories({"cudaLaunchKernel": "cudaGraphLaunch"}))
    )
    assert (first_calls(graph) == first_calls(graph)[0]).all()
    assert first_calls(graph)[0] >= 0


def test_a_kernel_of_absurd_length_is_remarked() -> None:
    assert not list(doubts(launched().trace()))
    recorder = launched()
    recorder.kernel(400, 410, 4e9, name="endless")
    (remark,) = doubts(recorder.trace())
    assert remark.startswith("endless takes 3,999,999.590 of the 3,999,999.988 ms")
    recorder.kernel(401, 3e9, 3e9 + 100)
    assert "begin before the one before them on their stream" in list(doubts(recorder.trace()))[1]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_few_kernels_of_absurd_length_are_remarked_whatever_their_number(count: int) -> None:
    """More than one operation in twenty is no exception."""

    def remarks_of(kernels: int) -> list[str]:
        recorder = launched(kernels)
        for stream in range(count):
            recorder.kernel(1, 2 + stream, 1e8 * (stream + 1), name="endless", stream=20 + stream)
        return list(doubts(recorder.trace()))

    (remark,) = remarks_of(20 * count)
    assert remark.startswith(f"endless and {count - 1} more each take at least 99,999.998 of the")
    assert "no other operation longer than 0.008 ms: if their times are damaged" in remark
    assert not remarks_of(10 * count)


@pytest.mark.parametrize(("columns", "doubtful"), [({}, True), ({"graph_node": 5}, False), ({"stream": 8}, False)])
def test_overlaps_on_one_stream_are_remarked(columns: dict[str, Any], doubtful: bool) -> None:
    recorder = launched()
    recorder.kernel(300, 310, 330)
    recorder.kernel(302, 320, 340, **columns)
    assert bool(list(doubts(recorder.trace()))) == doubtful
    rounded = launched()
    rounded.kernel(300, 310, 330)
    rounded.kernel(302, 329.2, 340)
    assert not list(doubts(rounded.trace()))


def of_processes(ranks_of: tuple[int, ...]) -> Trace:
    """Three processes with decreasing ids: the first uses GPU 1, the second GPU 0, the third no GPU."""
    recorder = Recorder()
    for process, device in ((0, 1), (1, 0)):
        for begin in (0, 500):
            recorder.kernel(begin, begin + 5, begin + 50, process=process, device=device)
    recorder.range("cpu", 0, 10, process=2)
    trace = recorder.trace(ranks=ranks_of)
    return replace(trace, processes=typed("processes", {"pid": [30, 20, 10], "rank": list(ranks_of)}))


def test_processes_of_unknown_rank_are_numbered_by_device() -> None:
    trace = of_processes((-1, -1, -1))
    assert ranks(trace).tolist() == [1, 0, 2]
    summary = summarise(trace)
    assert summary.budget[["rank", "device"]].to_numpy().tolist() == [[0, 0], [1, 1]]
    assert not summary.ranks_known
    assert "process 0's GPU" in sentence(summary.losses.iloc[0].to_dict())
    assert any("numbered by device" in line for line in summary.remarks)
    known = of_processes((1, 0, 2))
    assert ranks(known).tolist() == [1, 0, 2]
    assert "rank 0's GPU" in sentence(summarise(known).losses.iloc[0].to_dict())
    assert ranks(of_processes((0, 0, 1))).tolist() == [1, 0, 2]
    alone = launched().trace()
    assert "of the GPU (" in sentence(summarise(alone).losses.iloc[0].to_dict())
    assert np.array_equal(ranks(alone), [0])
