"""Exports of every generation become the same frames; unreadable exports are refused with the reason."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest
from helpers.traces.nsys_databases import random_database
from helpers.traces.nsys_exports import (
    CUDA_DEVICES,
    GENERATIONS,
    GPUS,
    KERNEL,
    MARK,
    NVTX,
    RUNTIME,
    START_END,
    Export,
    global_pid,
    global_tid,
)

from labkit.nsys.reader.reading import read
from labkit.nsys.trace import SCHEMA, Trace, TraceError

PID, TID = global_pid(77), global_tid(77, 78)
# A file that stays open raises this warning.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
PRODUCT = {generation: f"{version}, schema {schema}" for generation, (version, schema) in GENERATIONS.items()}


def opened(export: Export, folder: Path, *, schema: str | None = None, without: Collection[str] = ()) -> Trace:
    return read(export.write(folder / "made.sqlite", schema=schema, without=without), cache=False)


def kernels(generation: str = "2022.4") -> Export:
    export = Export(generation)
    export.call(10, 20, TID, 1)
    export.kernel(30, 40, PID, 1)
    return export


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("seed", range(4))
def test_frames_have_their_columns_and_are_sorted(seed: int, generation: str, tmp_path: Path) -> None:
    trace = read(random_database(tmp_path / "random.sqlite", 100 + seed, generation), cache=False)
    assert trace.source.version == PRODUCT[generation]
    for name, frame in trace.frames.items():
        assert {column: str(dtype) for column, dtype in frame.dtypes.items()} == dict(SCHEMA[name])
        assert "start_ns" not in frame or frame["start_ns"].is_monotonic_increasing
        assert "process" not in frame or frame["process"].isin(range(len(trace.processes))).all()
        for column in frame.select_dtypes("category"):
            assert not frame[column].isna().any()
            assert all(isinstance(text, str) for text in frame[column].cat.categories)
    assert (trace.ranges["end_ns"] >= trace.ranges["start_ns"]).all()


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_column_has_its_value(generation: str, tmp_path: Path) -> None:
    export = Export(generation)
    export.started(1_795_308_548_674_607_415)
    export.add("PROCESSES", {"globalPid": PID, "pid": 77, "name": "python"})
    export.add("PROCESSES", {"globalPid": global_pid(1), "pid": 1, "name": "init"})
    export.add("ThreadNames", {"nameId": export.string("main"), "priority": 20, "globalTid": TID})
    export.create(1, TID, 1, "labkit")
    export.labelled(5, 90, TID, "decode/step")
    export.call(10, 20, TID, 1)
    export.call(21, 22, TID, 2, "cuMemcpyDtoHAsync_v2")
    export.kernel(30, 40, PID, 1, "void gemm<float>()", node=5)
    export.copy(50, 60, PID, 2, kind=2, memory=(2, 1))
    export.memset(70, 71, PID, None)
    export.node(3, TID, 5, original=4)
    export.os(40, 60, TID, "poll")
    export.add(GPUS, {"vmId": 1, "id": 3, "name": "NVIDIA H100", "memoryBandwidth": 3_352_320_000_000})
    export.add(CUDA_DEVICES, {"gpuId": 3, "cudaId": 0, "pid": 77})
    if not export.old:
        export.graph(80, 99, PID, 2)
    trace = opened(export, tmp_path)

    assert trace.source.profiler == "nsys"
    assert trace.source.started_ns == 1_795_308_548_674_607_415
    assert trace.source.skipped == ()
    assert rows(trace.ranges) == [(2, 5, 90, 0, 78, "labkit", "decode/step", "PushPop", False)]
    launch = ("108 x 1 x 1", "128 x 1 x 1", 32, 1536)
    none = ("", "", 0, 0, 0, "")
    operations = [
        (30, 40, 0, "kernel", "void gemm<float>()", 0, 7, 1, 5, 0, "", *launch, 0, ""),
        (50, 60, 0, "memcpy", "DtoH", 0, 7, 2, 0, 4096, "Device -> Pinned", *none),
        (70, 71, 0, "memset", "memset", 0, 7, 0, 0, 512, "", *none),
        (80, 99, 0, "graph", "graph", 0, 7, 2, 0, 0, "", *none),
    ]
    assert rows(trace.operations) == operations[: 3 if export.old else 4]
    assert rows(trace.calls) == [
        (10, 20, 0, 78, "api", "cudaLaunchKernel", 1, 0, ""),
        (21, 22, 0, 78, "api", "cuMemcpyDtoHAsync_v2", 2, 0, ""),
        (40, 60, 0, 78, "os", "poll", 0, 0, ""),
    ]
    assert rows(trace.devices) == [(0, 0, "NVIDIA H100", 3352.32)]
    assert rows(trace.graph_nodes) == [(5, 4, 3, 0, 78)]
    assert rows(trace.processes) == [(77, -1, "python")]
    assert rows(trace.threads) == [(0, 78, "main")]


def rows(frame: pd.DataFrame) -> list[tuple]:
    return list(frame.itertuples(index=False, name=None))


@pytest.mark.parametrize(("generation", "end"), [("2022.4", 900), ("2023.4", 700), ("2026.1", 700)])
def test_an_open_range_ends_as_its_generation_has_it(generation: str, end: int, tmp_path: Path) -> None:
    """Up to 2022.4 it ends with the last NVTX event of any kind, later with the last event of a range."""
    export = Export(generation)
    export.range(100, None, TID, text="open")
    export.range(200, 300, TID, text="closed")
    export.range(400, 700, TID, text="ended elsewhere", eventType=START_END, endGlobalTid=TID ^ 1)
    export.range(900, None, TID, text="mark", eventType=MARK)
    trace = opened(export, tmp_path)
    assert trace.ranges["name"].tolist() == ["open", "closed"]
    assert trace.ranges["end_ns"].tolist() == [end, 300]
    assert trace.ranges["open"].tolist() == [True, False]
    marks, elsewhere = sorted(trace.source.skipped, key=len)
    assert marks.startswith("1 NVTX marks")
    assert elsewhere.startswith("1 NVTX ranges that ended on another thread")


def test_where_no_range_was_closed_open_ones_end_with_the_last_start(tmp_path: Path) -> None:
    export = Export()
    export.range(100, None, TID, text="outer")
    export.range(500, None, TID, text="inner")
    assert opened(export, tmp_path).ranges["end_ns"].tolist() == [500, 500]


def test_a_registered_string_counts_before_a_text(tmp_path: Path) -> None:
    export = Export()
    export.range(1, 9, TID, text="text", textId=export.string("registered"))
    export.range(2, 9, TID, text="text")
    export.range(3, 9, TID, textId=4711)  # an id of no string
    export.range(4, 9, TID)
    assert opened(export, tmp_path).ranges["name"].tolist() == ["registered", "text", "", ""]


def test_a_domain_has_the_first_name_that_its_process_gave_it(tmp_path: Path) -> None:
    export = Export()
    export.create(20, TID, 1, "later")
    export.create(10, global_tid(77, 99), 1, "first")
    export.create(5, global_tid(88, 88), 1, "of another process")
    export.range(30, 40, TID, text="a", domainId=1)
    export.range(31, 39, TID, text="b", domainId=2)
    assert opened(export, tmp_path).ranges["domain"].tolist() == ["first", ""]


def test_ends_before_starts_are_taken_as_of_no_length(tmp_path: Path) -> None:
    export = kernels()
    export.range(100, 90, TID, text="backwards")
    export.kernel(60, 50, PID, 1)
    export.call(100, 99, TID, 2)
    trace = opened(export, tmp_path)
    assert trace.ranges[["start_ns", "end_ns"]].to_numpy().tolist() == [[100, 100]]
    assert trace.operations["end_ns"].tolist() == [40, 60]
    assert len(trace.source.skipped) == 3
    assert all("end before the start" in line for line in trace.source.skipped)


def test_what_has_no_thread_is_left_out_and_said(tmp_path: Path) -> None:
    export = kernels()
    export.add(NVTX, {"start": 1, "end": 2, "eventType": 59, "text": "nobody's"})
    export.add(RUNTIME, {"start": 1, "end": 2, "eventClass": 0, "nameId": 1, "returnValue": 0})
    trace = opened(export, tmp_path)
    assert trace.ranges.empty
    assert len(trace.calls) == 1
    assert trace.source.skipped == (
        "1 NVTX ranges without a thread: left out",
        "1 calls of CUPTI_ACTIVITY_KIND_RUNTIME without a thread: left out",
    )


def test_operations_without_times_are_left_out_and_said(tmp_path: Path) -> None:
    export = kernels()
    export.kernel(0, 0, PID, 1, "lost")
    trace = opened(export, tmp_path)
    assert len(trace.operations) == 1
    assert trace.source.skipped == (f"1 operations of {KERNEL} without times: left out",)


def test_a_thread_without_a_name_is_left_out(tmp_path: Path) -> None:
    path = kernels().write(tmp_path / "made.sqlite")
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE ThreadNames (nameId INTEGER, globalTid INTEGER)")
        database.execute("INSERT INTO ThreadNames VALUES (NULL, ?)", (TID,))
        database.commit()
    assert read(path, cache=False).threads.empty


def test_every_table_may_be_missing(tmp_path: Path) -> None:
    whole = random_database(tmp_path / "whole.sqlite", 3, "2026.1")
    with sqlite3.connect(whole) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        path = Path(shutil.copy(whole, tmp_path / "less.sqlite"))
        with sqlite3.connect(path) as database:
            database.execute(f'DROP TABLE "{table}"')
        trace = read(path, cache=False)
        assert isinstance(trace, Trace)
        assert trace.ranges.empty == (table == NVTX)


def test_columns_that_are_missing_are_taken_as_unknown_and_said(tmp_path: Path) -> None:
    export = kernels()
    export.range(1, 99, TID, text="range")
    missing = ("streamId", "registersPerThread", "gridY", "staticSharedMemory", "graphNodeId")
    trace = opened(export, tmp_path, without=missing)
    assert trace.operations[["stream", "registers", "shared_bytes"]].to_numpy().tolist() == [[0, 0, 0]]
    assert trace.operations["grid"].tolist() == [""]
    assert trace.operations["block"].tolist() == ["128 x 1 x 1"]
    assert trace.source.skipped == tuple(f"{KERNEL} has no {name}: taken as unknown" for name in missing[:2])


def test_a_table_without_times_is_not_read_and_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as error:
        opened(kernels(), tmp_path, without=("end",))
    assert all(f"{table} has no start or no end: not read" in str(error.value) for table in (KERNEL, RUNTIME))


def test_a_newer_schema_is_read_and_what_it_adds_is_named(tmp_path: Path) -> None:
    path = kernels("2026.1").write(tmp_path / "newer.sqlite", schema="4.1.0")
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_TELEPORT (start INTEGER, end INTEGER, globalPid INTEGER)")
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_TELEPORT VALUES (1, 2, 3)")
        database.execute("CREATE TABLE ENUM_TELEPORT (id INTEGER, name TEXT)")
        database.execute(f"ALTER TABLE {KERNEL} ADD COLUMN flavour INTEGER")
    trace = read(path, cache=False)
    assert len(trace.operations) == 1
    (line,) = trace.source.skipped
    assert "schema 4.1.0 is newer than 3.25" in line
    assert trace.source.unread == ("1 CUPTI_ACTIVITY_KIND_TELEPORT",)


def test_the_newest_schema_known_is_not_called_newer(tmp_path: Path) -> None:
    assert opened(kernels("2026.1"), tmp_path, schema="3.25.0").source.skipped == ()


def test_the_file_is_not_touched_and_its_name_may_hold_anything(tmp_path: Path) -> None:
    path = kernels().write(tmp_path / "100% of it? #1 größe.sqlite")
    before = path.read_bytes()
    path.chmod(0o444)
    assert len(read(path, cache=False).operations) == 1
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.95])
def test_a_file_cut_short_is_never_half_a_trace(share: float, tmp_path: Path) -> None:
    path = random_database(tmp_path / "cut.sqlite", 1, "2022.4")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(TraceError, match=r"cut\.sqlite is damaged or was cut short .* export it again: nsys export"):
        read(path, cache=False)


def test_a_damaged_page_is_damage_not_a_crash(tmp_path: Path) -> None:
    path = random_database(tmp_path / "rotten.sqlite", 1, "2022.4")
    content = bytearray(path.read_bytes())
    for page in range(4096, len(content), 4096):
        content[page : page + 512] = b"\xff" * 512
    path.write_bytes(content)
    with pytest.raises(TraceError, match="damaged"):
        read(path, cache=False)


def test_text_where_numbers_belong_is_damage(tmp_path: Path) -> None:
    path = kernels().write(tmp_path / "words.sqlite")
    with sqlite3.connect(path) as database:
        database.execute(f"UPDATE {KERNEL} SET end = 'soon'")
    with pytest.raises(TraceError, match="damaged"):
        read(path, cache=False)


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "places.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE bookmarks (url TEXT)")
    with pytest.raises(TraceError, match=r"without any table of Nsight Systems; expected .*nsys export --type sqlite"):
        read(path, cache=False)


def test_an_export_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nothing in \S+ can be read \(it has no event\)"):
        opened(Export("2023.4"), tmp_path)


@pytest.mark.parametrize("kind", ["range", "kernel", "start"])
def test_times_that_no_capture_has_are_refused(kind: str, tmp_path: Path) -> None:
    """Such times overflow in sums: without the check, a range that ends at 2^63-1 is read and fails later."""
    export = kernels()
    if kind == "range":
        export.labelled(5, 2**63 - 1, TID, "decode/step")
    elif kind == "kernel":
        export.kernel(-(2**62), 40, PID, 1)
    else:
        export.started(2**63 - 1)
    with pytest.raises(TraceError, match=r"got a time of -?\d+ ns in \w+, expected less than"):
        opened(export, tmp_path)


def test_a_mark_of_a_rank_that_no_run_has_is_refused(tmp_path: Path) -> None:
    export = kernels()
    export.range(1, None, TID, text="rank.99999999999", eventType=MARK)
    with pytest.raises(TraceError, match=r"got rank 99999999999 in the mark rank\.N"):
        opened(export, tmp_path)
