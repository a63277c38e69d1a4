"""Exports suit viewers: the trace-event format, nested events on each thread, and arrows with both ends."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.traces.handmade import Recorder
from helpers.traces.random_traces import random_trace
from jsonschema import Draft202012Validator

from labkit.nsys.reader.reading import read
from labkit.nsys.timeline import export
from labkit.nsys.timeline.export import write_chrome
from labkit.nsys.timeline.synthetic import decode_trace
from labkit.nsys.trace import Source, Trace, typed
from labkit.stages import parse

NUMBER = {"type": "number"}
EVENT = {
    "type": "object",
    "required": ["ph", "ts", "pid", "tid", "name"],
    "properties": {
        "ph": {"enum": ["X", "M", "s", "f"]},
        "ts": NUMBER,
        "pid": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        "tid": {"type": "integer", "minimum": 0},
        "name": {"type": "string"},
        "cat": {"type": "string"},
        "args": {"type": "object"},
    },
    "allOf": [
        {
            "if": {"properties": {"ph": {"const": "X"}}},
            "then": {"required": ["dur", "cat", "args"], "properties": {"dur": {"type": "number", "minimum": 0}}},
        },
        {
            "if": {"properties": {"ph": {"enum": ["s", "f"]}}},
            "then": {"required": ["id", "cat"], "properties": {"id": {"type": "integer"}}},
        },
        {"if": {"properties": {"ph": {"const": "f"}}}, "then": {"required": ["bp"]}},
        {
            "if": {"properties": {"ph": {"const": "M"}}},
            "then": {
                "properties": {
                    "name": {"enum": ["process_name", "process_labels", "process_sort_index", "thread_name"]},
                    "args": {"minProperties": 1, "maxProperties": 1},
                }
            },
        },
    ],
}
SCHEMA = {
    "type": "object",
    "required": ["traceEvents", "displayTimeUnit"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {"type": "array", "items": EVENT},
        "baseTimeNanoseconds": {"type": "integer"},
        "distributedInfo": {"type": "object", "required": ["rank"]},
    },
}


def crossing_trace() -> Trace:
    """Ranges that overlap on one thread, and kernels that overlap on one stream."""
    recorder = Recorder()
    for start in range(4):
        recorder.range(f"crossing {start}", 10 * start, 10 * start + 35)
    recorder.kernel(3, 10, 30)
    recorder.kernel(4, 20, 40, registers=40)
    return recorder.trace()


def several() -> Trace:
    """Three ranks whose processes have the same number on their systems."""
    trace = decode_trace(steps=2, layers=1, ranks=3)
    return Trace(trace.source, trace.ranges, trace.operations, trace.calls, processes=trace.processes.assign(pid=77))


TRACES = {
    "one": decode_trace(steps=3, layers=2),
    "several": several(),
    "crossing": crossing_trace(),
    **{f"random {seed}": random_trace(seed) for seed in range(3)},
}


def document(path: Path) -> dict[str, Any]:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    loaded: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return loaded


@pytest.fixture(scope="module", params=TRACES)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Trace, list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("export") / "trace.json"
    write_chrome(TRACES[request.param], path)
    events = document(path)
    Draft202012Validator(SCHEMA).validate(events)
    return TRACES[request.param], events["traceEvents"]


def spans(events: list[dict[str, Any]], *categories: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and (not categories or event["cat"] in categories)]


def ns(microseconds: float) -> int:
    return round(microseconds * 1e3)


def test_every_event_is_there_to_the_nanosecond(written: tuple[Trace, list[dict[str, Any]]]) -> None:
    trace, events = written
    for frame, categories in (
        (trace.ranges, ("user_annotation",)),
        (trace.calls, ("cuda_runtime", "cuda_driver", "cpu_op")),
        (trace.operations, ("kernel", "gpu_memcpy", "gpu_memset", "gpu_graph")),
    ):
        times = Counter((ns(event["ts"]), ns(event["ts"] + event["dur"])) for event in spans(events, *categories))
        assert times == Counter(zip(frame["start_ns"], frame["end_ns"], strict=True))


def test_what_is_on_a_thread_nests(written: tuple[Trace, list[dict[str, Any]]]) -> None:
    _, events = written
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in spans(events):
        begin = ns(event["ts"])
        threads.setdefault((event["pid"], event["tid"]), []).append((begin, -(begin + ns(event["dur"]))))
    for intervals in threads.values():
        opened: list[int] = []
        for begin, end in sorted(intervals):
            while opened and opened[-1] <= begin:
                opened.pop()
            assert not opened or -end <= opened[-1]
            opened.append(-end)


def test_an_arrow_leads_from_within_a_call_to_within_its_work(written: tuple[Trace, list[dict[str, Any]]]) -> None:
    trace, events = written
    ends = {phase: {event["id"]: event for event in events if event["ph"] == phase} for phase in ("s", "f")}
    assert ends["s"].keys() == ends["f"].keys()
    assert len(ends["s"]) == len(trace.operations)
    calls = {(event["pid"], event["tid"], event["ts"]): event for event in spans(events, "cuda_runtime")}
    work = {(event["pid"], event["tid"], event["ts"]): event for event in spans(events, "kernel")}
    for key, tail in ends["s"].items():
        head = ends["f"][key]
        call = calls[tail["pid"], tail["tid"], tail["ts"]]
        launched = work[head["pid"], head["tid"], head["ts"]]
        assert call["args"]["correlation"] == launched["args"]["correlation"]
        assert launched["args"]["process"] == call["pid"]


def test_every_process_and_thread_has_one_name(written: tuple[Trace, list[dict[str, Any]]]) -> None:
    _, events = written
    named = Counter((event["pid"], event["tid"]) for event in events if event["name"] == "thread_name")
    assert named.keys() == {(event["pid"], event["tid"]) for event in spans(events)}
    assert set(named.values()) == {1}
    processes = Counter(event["pid"] for event in events if event["name"] == "process_name")
    assert processes.keys() >= {event["pid"] for event in spans(events)}
    assert set(processes.values()) == {1}


def test_arguments_tell_the_stage(written: tuple[Trace, list[dict[str, Any]]]) -> None:
    _, events = written
    for event in spans(events, "user_annotation"):
        label = parse(event["name"]) if event["args"].get("domain") == "labkit" else None
        assert event["args"].get("stage") == (label.stage if label else None)
        assert event["args"].get("layer") == (label.layer if label else None)


def test_a_kernel_tells_the_stage_it_belongs_to() -> None:
    trace = TRACES["one"]
    events = [
        json.loads(line) for piece in export._operations(trace, export.tracks(trace)) for line in piece.split(",\n")
    ]
    assert {event["args"]["stage"] for event in events if "decode_attention" in event["name"]} == {"attention"}
    assert events[0]["args"]["block"] == [128, 1, 1]


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_labkit_reads_it_back(tmp_path: Path, suffix: str) -> None:
    trace = TRACES["one"]
    source = Source("nsys", "2022.4", ("x.sqlite",), started_ns=1_700_000_000_123_456_789)
    path = write_chrome(Trace(source, *list(trace.frames.values())), tmp_path / f"trace{suffix}")
    back = read(path, cache=False)
    assert back.source.started_ns == source.started_ns
    for name, frame in trace.frames.items():
        columns = [column for column in frame if column != "range_id"]
        expected, actual = (
            table[columns].astype({column: str for column in columns if table[column].dtype == "category"})
            for table in (frame, back.frames[name])
        )
        pd.testing.assert_frame_equal(actual, expected)


def test_kinds_of_work_come_back(tmp_path: Path) -> None:
    kinds = ["kernel", "memcpy", "memset", "graph"]
    work = typed(
        "operations",
        {
            "start_ns": np.arange(4) * 100, "end_ns": np.arange(4) * 100 + 50, "kind": kinds, "device": [0, 0, 1, 1],
            "name": ["k", "HtoD", "memset", "graph"], "stream": [7, 7, 0, 9], "bytes": [0, 4096, 64, 0],
        },
    )  # fmt: skip
    trace = Trace(Source("nsys", "", ()), operations=work, processes=typed("processes", {"pid": [5], "rank": [2]}))
    back = read(write_chrome(trace, tmp_path / "work.json"), cache=False)
    for column in ("kind", "name", "device", "stream", "bytes", "start_ns", "end_ns"):
        assert back.operations[column].tolist() == work[column].tolist()


def test_a_trace_without_events_is_a_document(tmp_path: Path) -> None:
    assert document(write_chrome(Trace(Source("nsys", "", ())), tmp_path / "empty.json"))["traceEvents"] == []


def test_nothing_is_left_where_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "trace.json"
    path.write_text("before")
    monkeypatch.setattr(export, "_arrows", full)
    with pytest.raises(OSError, match="No space"):
        write_chrome(TRACES["one"], path)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
    assert path.read_text() == "before"
