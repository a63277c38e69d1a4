"""Traces of JAX, Ascend, MTIA, VizTracer and others: work of devices, work of the CPU, and unread events."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.traces.foreign_traces import ascend, jax_gpu, jax_tpu, mtia, named, span, viztracer

from labkit.nsys.analysis.launches import first_calls
from labkit.nsys.reader.reading import read
from labkit.nsys.tables.budget import budget
from labkit.nsys.tables.operations import copies
from labkit.nsys.tables.selection import Selection
from labkit.nsys.tables.summary import summarise
from labkit.nsys.trace import Trace, TraceError


def opened(folder: Path, document: object) -> Trace:
    path = folder / "foreign.json"
    path.write_text(json.dumps(document))
    return read(path, cache=False)


def work_rows(trace: Trace) -> list[tuple]:
    columns = ["kind", "name", "start_ns", "end_ns", "device", "stream", "bytes"]
    start = trace.operations["start_ns"].min()
    return [
        (kind, name, begin - start, end - start, *rest)
        for kind, name, begin, end, *rest in trace.operations[columns].itertuples(index=False)
    ]


def launched_by(trace: Trace) -> list[str]:
    return [str(trace.calls["name"][row]) if row >= 0 else "" for row in first_calls(trace)]


def test_work_calls_and_ranges_of_jax_on_gpus_are_read(tmp_path: Path) -> None:
    trace = opened(tmp_path, jax_gpu())
    assert work_rows(trace) == [
        ("kernel", "gemm_fusion_dot_1", 0, 10_500, 1, 7, 0),
        ("memcpy", "HtoD", 19_875, 24_875, 1, 7, 1024),
        ("memcpy", "DtoH", 29_875, 34_875, 1, 9, 0),
    ]
    assert trace.operations["memory"].tolist() == ["", "Pinned -> Device", ""]
    assert launched_by(trace) == ["cuLaunchKernelEx", "", ""]
    assert trace.ranges["name"].tolist() == ["PjitFunction(f)"]
    assert trace.processes["name"].tolist() == ["/host:CPU"]
    assert sorted(trace.source.unread) == ["1 of '/device:GPU:1', 'XLA Modules'", "1 of '/device:GPU:1', 'XLA Ops'"]


def test_copies_of_jax_have_the_direction_of_their_memories_and_no_size_that_is_not_told(tmp_path: Path) -> None:
    details = {
        "": "unknown", "kind_src:device kind_dst:pageable size:5000": "DtoH", "kind_src:managed size:x": "unknown",
        "kind_src:device kind_dst:device_static size:64 :": "DtoD", "size": "unknown",
    }  # fmt: skip
    copied = [span(1, 7, "MemcpyOther", 10 * number, 5, memcpy_details=text) for number, text in enumerate(details, 1)]
    trace = opened(tmp_path, [*named(1, "/device:GPU:0", {7: "Stream #7(Memcpy)"}), *copied])
    assert trace.operations["name"].tolist() == list(details.values())
    assert trace.operations["bytes"].tolist() == [0, 5000, 0, 64, 0]
    table = copies(trace).set_index("name")
    assert table.loc["unknown", ["size", "count"]].tolist() == ["unknown", 3]
    assert table.loc["unknown", ["bytes", "gb_s"]].isna().all()
    assert table.loc["DtoH", ["memory", "size", "bytes", "gb_s"]].tolist() == ["Device -> Pageable", "4-64 KB", 5000, 1]


def test_a_stream_with_a_text_as_its_name_is_stated(tmp_path: Path) -> None:
    """The text of the first event is the first of the file, too."""
    work = [span(1, 7, "fusion", 10 * number, 5, **stated) for number, stated in enumerate(({"stream": "main"}, {}))]
    trace = opened(tmp_path, [*named(1, "/device:GPU:0", {7: "Stream #7(Compute)"}), *work])
    of_text, of_thread = trace.operations["stream"].tolist()
    assert of_thread == 7 != of_text


def test_operators_of_jax_on_tpus_are_the_work(tmp_path: Path) -> None:
    trace = opened(tmp_path, jax_tpu())
    assert work_rows(trace) == [
        ("kernel", "fusion.3", 0, 12_000, 2, 3, 0),
        ("kernel", "copy.1", 15_000, 30_000, 2, 3, 0),
    ]
    assert budget(trace)["busy_ns"].tolist() == [27_000]
    assert len(trace.source.unread) == 2


def test_work_of_ascend_is_read_once(tmp_path: Path) -> None:
    """Waits are not work. The planes of HCCL and the overlaps repeat events of the streams, so they are not read."""
    trace = opened(tmp_path, ascend())
    assert work_rows(trace) == [
        ("kernel", "MatMulV2", 0, 10_000, 0, 2, 0),
        ("memcpy", "HtoD", 30_000, 34_000, 0, 3, 2048),
    ]
    assert launched_by(trace) == ["AscendCL@aclnnMatmul", ""]
    assert trace.ranges["name"].tolist() == ["Enqueue"]
    assert trace.calls["name"].tolist() == ["aten::mm", "AscendCL@aclnnMatmul", "Node@launch"]
    assert sorted(trace.source.unread) == [
        "1 counters", "1 of 'Communication', 'Plane 0'", "1 of 'Overlap Analysis', 'Computing'",
        "1 of 'Overlap Analysis', 'Free'", "1 waits of devices",
    ]  # fmt: skip


def test_work_calls_and_idle_time_of_mtia_are_read(tmp_path: Path) -> None:
    trace = opened(tmp_path, mtia())
    assert work_rows(trace) == [
        ("kernel", "fc-dtype_Float", 0, 40_000, 17, 108, 0),
        ("memcpy", "DtoH", 50_000, 55_000, 17, 108, 1024),
    ]
    assert launched_by(trace) == ["runFunction - job", ""]
    assert trace.source.profiler == "torch.profiler"
    assert trace.processes["name"].tolist() == ["service"]
    assert budget(trace)["idle_ns"].tolist() == [10_000]


@pytest.mark.parametrize("document", [viztracer, jax_gpu, ascend])
def test_no_word_of_nsys_or_cuda_names_what_others_record(document: Callable[[], object], tmp_path: Path) -> None:
    trace = opened(tmp_path, document())
    words = set(summarise(trace).contents["what"])
    assert not {word for word in words if "NVTX" in word}
    assert ("CUDA calls" in words) == (document is jax_gpu)
    for selection in (Selection(name="no such"), Selection(range="no such")):
        with pytest.raises(TraceError, match="names of ranges matches") as error_info:
            selection.of(trace, "ranges")
        assert "NVTX" not in str(error_info.value)


def test_times_of_ranges_are_named_where_there_are_ranges(tmp_path: Path) -> None:
    calls = [span(1, 1, "aten::mm", 1, 2, "cpu_op")]
    assert summarise(opened(tmp_path, calls)).remarks == ("no GPU work was recorded",)
    with_range = [*calls, span(1, 1, "mine", 0, 4, "user_annotation")]
    assert summarise(opened(tmp_path, with_range)).remarks[0].endswith("so times of ranges are on the CPU")


def test_calls_of_viztracer_become_ranges(tmp_path: Path) -> None:
    trace = opened(tmp_path, viztracer())
    assert trace.ranges["name"].tolist() == ["main (/a.py:1)", "work (/a.py:9)"]
    assert trace.threads["name"].tolist() == ["MainThread"]
    assert trace.source.unread == ("2 asynchronous events", "1 counters")
    assert trace.source.profiler == "a Chrome trace"


@pytest.mark.parametrize("first", [True, False])
def test_names_of_processes_may_come_last(first: bool, tmp_path: Path) -> None:
    names, events = named("GPU0", "GPU 0", {1: "QUEUE 4"}), [span("GPU0", 1, "gemm", 1, 2), span(9, 9, "host", 0, 9)]
    trace = opened(tmp_path, [*names, *events] if first else [*events, *names])
    assert work_rows(trace) == [("kernel", "gemm", 0, 2000, 0, 4, 0)]
    assert trace.ranges["name"].tolist() == ["host"]


@pytest.mark.parametrize(
    ("document", "unread"),
    [
        ([], "it has no event"),
        ({"traceEvents": []}, "it has no event"),
        (named(1, "python"), "it has no event"),
        ([{"ph": "C", "name": "memory", "pid": 1, "ts": 1, "args": {"rss": 1}}] * 2, "2 counters"),
        ([span(1, 1, "f", 1, 2, "python_function")], "1 python_function"),
        ([{"ph": "b", "cat": "a", "id": 1, "name": "x", "ts": 1}], "1 asynchronous events"),
        ([{"ph": "B", "name": "x", "ts": 1, "pid": 1, "tid": 1}], "1 events with a begin or an end only"),
        ([*named(3, "MTIA 3", {1: "PACKET"}), span(3, 1, "p", 1, 2)], "1 of 'MTIA 3', 'PACKET'"),
    ],
)
def test_an_unreadable_trace_is_refused_with_a_list_of_its_events(
    document: object, unread: str, tmp_path: Path
) -> None:
    with pytest.raises(TraceError, match=f"nothing in foreign.json.*{unread}"):
        opened(tmp_path, document)


def test_lists_of_events_need_no_closing_bracket(tmp_path: Path) -> None:
    text = json.dumps([span(1, 1, "a", 1, 2), span(1, 1, "b", 4, 2, nested={"x": {}})])
    for number, end in enumerate((text[:-1], text[:-1] + "\n", text[:-1] + " ,\n")):
        path = tmp_path / f"{number}.json"
        path.write_text(end)
        trace = read(path, cache=False)
        assert trace.ranges["name"].tolist() == ["a", "b"]
        assert "no end" in trace.source.skipped[0]
    for cut in (text[:-2], text[: text.index('{"x"') + 5], text[: text.index('{"x"') + 7], text[:30], "[", "[{}"):
        path.write_text(cut)
        with pytest.raises(TraceError, match=r"not complete JSON|no trace"):
            read(path, cache=False)


def test_null_arguments_and_long_ids_are_read(tmp_path: Path) -> None:
    kernel = span(
        0, 7, "gemm", 9, 2, "kernel", device=0, stream=2**63 + 5, correlation=2**64 + 1, grid=None, bytes=None
    )
    call = span(2**64, "t", "cudaLaunchKernel", 3, 1, "cuda_runtime", correlation=2**64 + 1)
    alone = span(3, None, "x", 1, None) | {"args": None}
    trace = opened(tmp_path, [alone, call, kernel])
    assert launched_by(trace) == ["cudaLaunchKernel"]
    assert trace.ranges[["name", "start_ns", "end_ns"]].to_numpy().tolist() == [["x", 1000, 1000]]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (b'[{"ph": "X", "name": "a", "ts": NaN}]', "NaN is no number of JSON"),
        (b'[{"ph": "X", "name": "a", "ts": 1, "dur": Infinity}]', "Infinity is no number of JSON"),
        (b'[{"ph": "X", "name": "a", "ts": -inf}]', "inf is no number of JSON"),
        (b'[{"ph": "X", "name": "a", "ts": "nan"}]', 'got ts = "nan", expected a time'),
        (b'[{"ph": "X", "name": "a", "ts": 1, "dur": "Infinity"}]', "got a time of Infinity us"),
        (b'[{"ph": "X", "name": "a", "ts": null}]', "got ts = null, expected a time"),
        (b'[{"ph": "X", "name": "a"}]', "got ts = none, expected a time"),
        (b'[{"ph": "X", "name": "a", "ts": 1}, 5]', "element 2 is no event: got 5, expected an object"),
        (b'[{"ph": "X", "name": "a", "ts": 1} {}]', "is not JSON"),
        (b'[{"ph": "X", "name": "a", "ts": 1e99999999999999999999}]', "exponent"),
        (b'[{"ph": "X", "name": "\\udc00\\ud800", "ts": 1}]', "surrogate"),
        (b"[" + b"1" * 5000 + b"]", "more than 1000 digits"),
        (b'[{"ph": "X", "name": ' + b"[" * 100_000, "nested"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n", "a pointer of Git LFS.*git lfs pull"),
    ],
)
def test_refusals_name_their_cause(text: bytes, cause: str, tmp_path: Path) -> None:
    for name, content in {"odd.json": text, "odd.json.gz": gzip.compress(text)}.items():
        if name.endswith("gz") and text.startswith(b"version"):
            continue
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match=cause) as error_info:
            read(tmp_path / name, cache=False)
        assert "killed" not in str(error_info.value)


def test_bytes_that_are_no_utf8_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "latin.json"
    text = json.dumps([span(1, 1, "gr\xfc\xdfe", number, 1) for number in range(3)], ensure_ascii=False)
    path.write_bytes(text.encode("latin-1"))
    trace = read(path, cache=False)
    assert trace.ranges["name"].tolist() == ["gr\ufffd\ufffde"] * 3
    assert trace.source.skipped == ("bytes that are not UTF-8 are shown as \ufffd",)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read(path, cache=False).ranges["name"].tolist() == ["gr\xfc\xdfe"] * 3
