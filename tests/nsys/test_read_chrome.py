"""Chrome traces of torch.profiler and labkit are read to the nanosecond; other files are refused."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from helpers.sweeps import sweep

from labkit.nsys.analysis.attribution import attribute
from labkit.nsys.analysis.projection import project
from labkit.nsys.reader.reading import read
from labkit.nsys.timeline.export import write_chrome
from labkit.nsys.timeline.synthetic import decode_trace
from labkit.nsys.trace import TraceError

BASE_NS = 1_790_857_026_000_000_000
PROGRAM = """
import sys, torch
from torch.profiler import ProfilerActivity, profile, record_function
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    with record_function("decode/step"):
        for layer in range(2):
            with record_function(f"decode/layer.{layer}/qkv"):
                torch.ones(8, 8) @ torch.ones(8, 8)
    with record_function("something else"):
        torch.zeros(3)
profiler.export_chrome_trace(sys.argv[1])
"""

Event = dict[str, object]


def event(
    category: str, name: str, ts: object, dur: object, pid: object = 77, tid: object = 78, **args: object
) -> Event:
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


GPU: list[Event] = [
    {"ph": "M", "name": "process_name", "ts": 0, "pid": 77, "tid": 0, "args": {"name": "python"}},
    {"ph": "M", "name": "thread_name", "ts": 0, "pid": 77, "tid": 78, "args": {"name": "main"}},
    event("user_annotation", "decode/layer.0/qkv", 1.0, 50.5),
    event("cpu_op", "aten::mm", 2, 40, **{"External id": 3, "Input Dims": [[2, 3], [3]], "Input type": ["float"] * 2}),
    event("cuda_runtime", "cudaLaunchKernel", 3.001, 4.002, correlation=9),
    event(
        "kernel", "void gemm<float>()", 20.25, 10, 0, 7, device=0, stream=7, correlation=9, grid=[2, 1, 1],
        block=[128, 1, 1], **{"registers per thread": 32, "shared memory": 1024, "graph node id": 5, "External id": 3},
    ),
    event("cuda_driver", "cuMemcpyDtoHAsync", 35, 1, correlation=10),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 40, 2.5, 0, 7, device=0, stream=7, correlation=10, bytes=64),
    event("gpu_memset", "Memset (Device)", 44, 1, 0, 9, device=0, stream=9, correlation=0, bytes=32),
    event("gpu_user_annotation", "decode/layer.0/qkv", 20, 30, 0, 7),
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 9, "ts": 3, "pid": 77, "tid": 78},
    {"ph": "i", "name": "Record Window End", "ts": 99, "pid": "", "tid": "", "s": "g"},
    event("Trace", "PyTorch Profiler (0)", 0, 100, "Spans", "PyTorch Profiler"),
]  # fmt: skip


def written(folder: Path, document: object, name: str = "trace.json") -> Path:
    path = folder / name
    text = json.dumps(document)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "gzip.without.a.name.gz"])
@pytest.mark.parametrize("bare", [False, True])
def test_every_kind_of_event_is_read(name: str, bare: bool, tmp_path: Path) -> None:
    trace = read(written(tmp_path, GPU if bare else {"traceEvents": GPU}, name), cache=False)
    assert trace.source.profiler == "torch.profiler"
    assert rows(trace.ranges) == [(3, 1000, 51500, 0, 78, "labkit", "decode/layer.0/qkv", "PushPop", False)]
    assert rows(trace.calls) == [
        (2000, 42000, 0, 78, "op", "aten::mm", 0, 3, '{"dims": [[2, 3], [3]], "types": ["float", "float"]}'),
        (3001, 7003, 0, 78, "api", "cudaLaunchKernel", 9, 0, ""),
        (35000, 36000, 0, 78, "api", "cuMemcpyDtoHAsync", 10, 0, ""),
    ]
    assert rows(trace.operations) == [
        (
            20250,
            30250,
            0,
            "kernel",
            "void gemm<float>()",
            0,
            7,
            9,
            5,
            0,
            "",
            "2 x 1 x 1",
            "128 x 1 x 1",
            32,
            1024,
            3,
            "",
        ),
        (40000, 42500, 0, "memcpy", "DtoH", 0, 7, 10, 0, 64, "Device -> Pinned", "", "", 0, 0, 0, ""),
        (44000, 45000, 0, "memset", "memset", 0, 9, 0, 0, 32, "", "", "", 0, 0, 0, ""),
    ]
    assert rows(trace.processes) == [(77, -1, "python")]
    assert rows(trace.threads) == [(0, 78, "main")]
    assert project(trace)["operations"].tolist() == [2]
    assert list(attribute(trace).how) == ["call", "call", "none"]
    assert sorted(trace.source.unread) == ["1 Trace", "1 gpu_user_annotation", "1 marks"]


def test_the_categories_of_old_versions_and_the_devices_are_known(tmp_path: Path) -> None:
    """PyTorch up to 1.10 used other names of categories; the names of devices are outside the events."""
    events = [
        event("Operator", "aten::mm", 2, 40),
        event("Runtime", "cudaLaunchKernel", 3, 4, correlation=9),
        event("Kernel", "gemm", 20, 10, 0, 7, device=2, stream=7, correlation=9),
        event("Memcpy", "Memcpy HtoD (Pageable -> Device)", 40, 2, 0, 7, device=2, stream=7, correlation=0, bytes=64),
    ]
    devices = [{"id": number, "name": f"GPU {number}", "numSms": 8} for number in range(4)]
    trace = read(written(tmp_path, {"deviceProperties": devices, "traceEvents": events}), cache=False)
    assert trace.calls["kind"].tolist() == ["op", "api"]
    assert trace.operations["kind"].tolist() == ["kernel", "memcpy"]
    assert rows(trace.devices) == [(0, 2, "GPU 2", 0.0)]


def test_operations_without_times_are_left_out_and_said(tmp_path: Path) -> None:
    timed = event("kernel", "timed", 20, 10, 0, 7, device=0, stream=7, correlation=9)
    trace = read(written(tmp_path, [timed, {**timed, "name": "lost", "ts": 0, "dur": 0}]), cache=False)
    assert trace.operations["name"].tolist() == ["timed"]
    assert trace.source.skipped == ("1 events of a GPU without times: left out",)


def test_what_a_kernel_of_nccl_exchanges_is_kept(tmp_path: Path) -> None:
    exchange = {"Collective name": "allreduce", "In msg nelems": 1024, "dtype": "Half", "Group size": 2, "Seq": 7}
    kernel = event("kernel", "ncclDevKernel", 20, 10, 0, 7, device=0, stream=7, correlation=9, **exchange)
    trace = read(written(tmp_path, [kernel]), cache=False)
    collective = json.loads(trace.operations["collective"].iloc[0])
    assert collective == {"name": "allreduce", "in_elements": 1024, "dtype": "Half", "size": 2, "sequence": 7}


def rows(frame: pd.DataFrame) -> list[tuple]:
    return list(frame.itertuples(index=False, name=None))


def test_times_keep_their_nanoseconds_however_many_digits_they_have(tmp_path: Path) -> None:
    """A float of microseconds since 1970 is exact only to a quarter of a microsecond."""
    path = tmp_path / "digits.json"
    times = ("1795308548674607.415", '"1795308548674607.416"', "1795308548674609")
    events = ",".join(json.dumps(event("user_annotation", "a", 0, 1)).replace('"ts": 0', f'"ts": {ts}') for ts in times)
    path.write_text(f'{{"traceEvents": [{events}]}}')
    trace = read(path, cache=False)
    assert trace.ranges["start_ns"].tolist() == [0, 1, 1585]
    assert trace.source.started_ns == 1_795_308_548_674_607_415


@pytest.mark.parametrize("late", [0, 4_454_152_332_803_837_123])
def test_the_clock_starts_at_the_base_or_with_the_first_event(late: int, tmp_path: Path) -> None:
    """Kineto's base is months before the first event; a file of labkit begins at its base."""
    us = late // 1000
    document = {"traceEvents": [event("user_annotation", "a", us + 5, 1)], "baseTimeNanoseconds": BASE_NS}
    trace = read(written(tmp_path, document), cache=False)
    assert trace.source.started_ns is not None
    assert trace.source.started_ns + trace.ranges["start_ns"].iloc[0] == BASE_NS + us * 1000 + 5000
    assert trace.ranges["start_ns"].iloc[0] == (0 if late else 5000)


@pytest.mark.parametrize("at_the_end", [False, True])
def test_metadata_is_found_before_and_after_the_events(at_the_end: bool, tmp_path: Path) -> None:
    metadata = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8, "pg_config": [{"pg_name": "0", "rank": 1}]},
        "baseTimeNanoseconds": BASE_NS,
    }
    events = {"traceEvents": [event("cpu_op", "aten::add" + "x" * 200, index, 1) for index in range(2000)]}
    trace = read(written(tmp_path, {**events, **metadata} if at_the_end else {**metadata, **events}), cache=False)
    assert trace.processes["rank"].tolist() == [3]
    assert trace.source.version == "schema 1"
    assert trace.source.started_ns == BASE_NS


def test_operations_of_several_processes_find_their_callers(tmp_path: Path) -> None:
    events = []
    for pid, correlation in ((77, 1), (99, 2)):
        events.append(event("cuda_runtime", "cudaLaunchKernel", pid, 1, pid, pid, correlation=correlation))
        events.append(event("kernel", f"of {pid}", pid + 5, 1, 0, 7, device=0, stream=7, correlation=correlation))
    trace = read(written(tmp_path, events), cache=False)
    pids = trace.processes["pid"].to_numpy()[trace.operations["process"]]
    assert [f"of {pid}" for pid in pids] == trace.operations["name"].tolist()


def test_kernels_alone_are_a_trace(tmp_path: Path) -> None:
    trace = read(written(tmp_path, [event("kernel", "gemm", 1, 1, 0, 7)]), cache=False)
    assert len(trace.operations) == 1
    assert trace.on_gpu


def test_ends_before_starts_are_taken_as_of_no_length(tmp_path: Path) -> None:
    trace = read(written(tmp_path, [event("kernel", "gemm", 5, -1.5)]), cache=False)
    assert trace.operations[["start_ns", "end_ns"]].to_numpy().tolist() == [[5000, 5000]]
    assert trace.source.skipped == ("1 events with an end before the start: taken as of no length",)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_what_labkit_writes_it_reads_back(ranks: int, name: str, tmp_path: Path) -> None:
    trace = decode_trace(steps=3, layers=2, ranks=ranks)
    back = read(write_chrome(trace, tmp_path / name), cache=False)
    for frame in ("ranges", "operations", "calls", "processes", "threads"):
        ours, theirs = (source.frames[frame].drop(columns="range_id", errors="ignore") for source in (trace, back))
        texts = dict.fromkeys(ours.select_dtypes("category"), "str")
        pd.testing.assert_frame_equal(ours.astype(texts), theirs.astype(texts))


@sweep
def test_what_torch_profiler_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "torch-r2.json"
    subprocess.run([sys.executable, "-P", "-c", PROGRAM, str(path)], check=True, capture_output=True)
    trace = read(path, cache=False)
    events = [entry for entry in json.loads(path.read_text())["traceEvents"] if entry.get("cat") == "user_annotation"]
    expected = ["decode/step", "decode/layer.0/qkv", "decode/layer.1/qkv", "something else"]
    assert trace.ranges["name"].tolist() == expected == [entry["name"] for entry in events]
    assert trace.ranges["domain"].tolist() == ["labkit"] * 3 + [""]
    lengths = (trace.ranges["end_ns"] - trace.ranges["start_ns"]).tolist()
    assert lengths == [round(entry["dur"] * 1000) for entry in events]
    assert {"aten::mm", "aten::ones", "aten::zeros"} <= set(trace.calls["name"])
    assert trace.processes["rank"].tolist() == [2]
    assert trace.source.started_ns is not None
    assert trace.source.started_ns > BASE_NS
    assert project(trace)["level"].tolist() == [0, 1, 1, 0]
    assert 0 < attribute(trace).coverage <= 1


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
@pytest.mark.parametrize("name", ["cut.json", "cut.json.gz"])
def test_a_file_cut_short_is_never_half_a_trace(share: float, name: str, tmp_path: Path) -> None:
    path = written(tmp_path, {"traceEvents": GPU * 20}, name)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(TraceError, match=r"cut\.json.* is not complete JSON .* record again"):
        read(path, cache=False)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"results": [1, 2]},
        {"traceEvents": [1, 2]},
        [1, 2],
        [{"a": 1}],
        ["a"],
        {"traceEvents": [{"ph": "X", "cat": "kernel"}]},
    ],
)
def test_other_json_is_no_trace(document: object, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.json.*; expected a Chrome trace"):
        read(written(tmp_path, document), cache=False)


def test_times_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="element 1 is no event"):
        read(written(tmp_path, [event("kernel", "gemm", "soon", 1)]), cache=False)


@pytest.mark.parametrize(
    "document",
    [
        [event("kernel", "gemm", 2**63 // 1000, 1)],
        [event("kernel", "gemm", 1, 1e300)],
        {"traceEvents": [], "baseTimeNanoseconds": 2**63 - 1},
        {"traceEvents": [], "distributedInfo": {"rank": 10**30}},
        [{"ph": "M", "name": "process_labels", "pid": 1, "tid": 0, "args": {"labels": "rank 99999999999"}}],
    ],
    ids=["time", "duration", "base", "rank", "label"],
)
def test_numbers_that_no_capture_has_are_refused(document: object, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"expected (less than|at most)"):
        read(written(tmp_path, document), cache=False)


@pytest.mark.parametrize("begin", ["", "x"])
@pytest.mark.parametrize("escape", [r"\n", r"\"", r"\\"])
def test_a_text_of_megabytes_with_escapes_is_refused(escape: str, begin: str, tmp_path: Path) -> None:
    """The parser's time grows with the square of the text's length: minutes for 60 megabytes."""
    event = {"ph": "X", "cat": "kernel", "name": "NAME", "ts": 0, "dur": 1, "pid": 1, "tid": 1}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event]}).replace("NAME", begin + escape * (1 << 20)))
    with pytest.raises(TraceError, match="is no trace: it has a text of megabytes with escapes"):
        read(path, cache=False)
    path.write_text(json.dumps({"traceEvents": [event]}).replace("NAME", begin + escape * (1 << 17)))
    assert len(read(path, cache=False).operations) == 1
