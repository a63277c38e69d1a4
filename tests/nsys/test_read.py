"""One call reads any trace: recognised by its content, ranks on one clock, and a cache that does no harm."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest
from helpers.house.source_tree import imports, modules
from helpers.traces.nsys_databases import random_database
from helpers.traces.nsys_exports import Export, global_pid, global_tid

from labkit.nsys import kept_results
from labkit.nsys.analysis.attribution import attribute
from labkit.nsys.analysis.projection import project
from labkit.nsys.reader.reading import read
from labkit.nsys.trace import Trace, TraceError

EPOCH_NS = 1_795_308_548_674_607_415


def rank(folder: Path, name: str, started_ns: int | None, label: str = "decode/embed") -> Path:
    """Export of one rank. All ranks have the same pid, threads and correlations."""
    export = Export()
    if started_ns is not None:
        export.started(started_ns)
    tid, pid = global_tid(77, 77), global_pid(77)
    export.create(0, tid, 1, "labkit")
    export.labelled(100, 200, tid, label)
    export.call(110, 120, tid, 1)
    export.node(105, tid, 5)
    export.kernel(300, 330, pid, 1)
    return export.write(folder / name)


def chrome(folder: Path, name: str, rank: int | None = None) -> Path:
    event = {"ph": "X", "cat": "user_annotation", "name": "decode/embed", "ts": 1, "dur": 2, "pid": 77, "tid": 77}
    metadata = {} if rank is None else {"distributedInfo": {"rank": rank}}
    path = folder / name
    path.write_text(json.dumps({**metadata, "traceEvents": [event], "baseTimeNanoseconds": EPOCH_NS}))
    return path


def assert_same(first: Trace, second: Trace) -> None:
    assert first.source == second.source
    for name, frame in first.frames.items():
        pd.testing.assert_frame_equal(frame, second.frames[name])


def test_a_file_is_known_by_its_content(tmp_path: Path) -> None:
    database = rank(tmp_path, "named.json", EPOCH_NS)
    text = chrome(tmp_path, "named.sqlite")
    packed = tmp_path / "named"
    packed.write_bytes(gzip.compress(text.read_bytes()))
    spaced = tmp_path / "spaced.txt"
    spaced.write_bytes(b" \n" + text.read_bytes())
    assert read(database, cache=False).source.profiler == "nsys"
    for path in (text, packed, str(spaced)):
        assert read(path, cache=False).source.profiler == "torch.profiler"


def test_ranks_are_put_on_one_clock_and_stay_processes_of_their_own(tmp_path: Path) -> None:
    paths = [rank(tmp_path, f"run-r{index}.sqlite", EPOCH_NS + 1000 * (2 - index)) for index in range(3)]
    trace = read(paths, cache=False)
    assert trace.source.files == ("run-r0.sqlite", "run-r1.sqlite", "run-r2.sqlite")
    assert trace.source.started_ns == EPOCH_NS
    assert trace.source.skipped == ()
    assert trace.processes["rank"].tolist() == [0, 1, 2]
    for frame in ("ranges", "calls", "operations", "graph_nodes"):
        starts = trace.frames[frame]["start_ns"]
        assert trace.frames[frame]["process"].tolist() == [2, 1, 0]
        assert (starts - starts.iloc[0]).tolist() == [0, 1000, 2000]
    assert trace.ranges["name"].tolist() == ["decode/embed"] * 3
    assert project(trace)["operations"].tolist() == [1, 1, 1]
    assert attribute(trace).range_of_operation.tolist() == [0, 1, 2]


def test_without_a_common_clock_it_is_said(tmp_path: Path) -> None:
    paths = [rank(tmp_path, "a.sqlite", EPOCH_NS + 50), rank(tmp_path, "b.sqlite", None, "decode/sample")]
    trace = read(paths, cache=False)
    assert trace.source.skipped == ("b.sqlite: no start time, so it is not on one clock with the others",)
    assert trace.source.started_ns == EPOCH_NS + 50
    assert sorted(trace.ranges["start_ns"]) == [100, 100]
    neither = read([paths[1], rank(tmp_path, "c.sqlite", None)], cache=False)
    assert neither.source.started_ns is None
    assert len(neither.source.skipped) == 2


def test_exports_and_chrome_traces_may_be_ranks_of_one(tmp_path: Path) -> None:
    trace = read([rank(tmp_path, "r0.sqlite", EPOCH_NS + 5), chrome(tmp_path, "other.json", rank=1)], cache=False)
    assert trace.source.profiler == "nsys and torch.profiler"
    assert trace.processes["rank"].tolist() == [0, 1]
    assert trace.ranges[["start_ns", "process"]].to_numpy().tolist() == [[105, 0], [1000, 1]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("r3.sqlite", 3),
        ("run-r12.sqlite", 12),
        ("rank_0.sqlite", 0),
        ("trace.rank7.sqlite", 7),
        ("out_RANK-4.sqlite", 4),
        ("run.sqlite", -1),
        ("mirror2.sqlite", -1),
        ("r2d2.sqlite", -1),
        ("h100.sqlite", -1),
    ],
)
def test_the_rank_is_in_the_name(name: str, expected: int, tmp_path: Path) -> None:
    assert read(rank(tmp_path, name, None), cache=False).processes["rank"].tolist() == [expected]


def test_a_rank_that_no_run_has_is_refused(tmp_path: Path) -> None:
    """A name with a date and a time looks like such a rank."""
    for name in ("run-r20261122101010.sqlite", f"run-r{'9' * 200}.sqlite"):
        with pytest.raises(
            TraceError, match=r"^got rank \d+.* in the name of run-r\d+\.sqlite; expected at most 2147483647"
        ):
            read(rank(tmp_path, name, None), cache=False)


def test_what_a_file_says_of_its_rank_counts_before_its_name(tmp_path: Path) -> None:
    assert read(chrome(tmp_path, "r5.json", rank=2), cache=False).processes["rank"].tolist() == [2]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "it is empty|is empty"),
        (b"U3w[END]NVIDIA Nsight Systems Stream 2022.4.2.1-df98", r"raw stream \(\.qdstrm\).*importer.*labkit doctor"),
        (b"NVIDIA Tegra Profiler Report 1.", "nsys export --type sqlite odd"),
        (b"\x89PNG\r\n\x1a\n", r'begins with "\\x89PNG'),
        ("[1]".encode("utf-16"), r'begins with "\\xff\\xfe\[\\x001'),
        (b"SQLite format 3\0", "cut short"),
        (b"\x1f\x8b" + b"\0" * 50, "not complete JSON"),
    ],
)
def test_other_files_are_named_for_what_they_are(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "odd"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=expected):
        read(path)


def test_folders_and_missing_files_are_refused(tmp_path: Path) -> None:
    rank(tmp_path, "r0.sqlite", None)
    with pytest.raises(TraceError, match=r"is a folder; name the files in it \(r0\.sqlite\)"):
        read(tmp_path)
    with pytest.raises(TraceError, match="which does not exist"):
        read(tmp_path / "r1.sqlite")
    with pytest.raises(TraceError, match="got no file"):
        read([])


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of cached traces, in a cache that keeps small files too."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_results, "SMALLEST_BYTES", 0)
    return tmp_path / "cache" / "traces"


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Sequence[Path]:
    """List of exports that were read and not taken from the cache."""
    paths: list[Path] = []
    read_module = import_module("labkit.nsys.reader.reading")  # the name labkit.nsys.read is a function
    reader = read_module.read_sqlite

    def counting(path: Path) -> Trace:
        paths.append(path)
        return reader(path)

    monkeypatch.setattr(read_module, "read_sqlite", counting)
    return paths


@pytest.mark.parametrize("seed", range(3))
def test_a_cached_trace_is_the_trace(seed: int, cached: Path, readings: Sequence[Path], tmp_path: Path) -> None:
    path = random_database(tmp_path / "run-r1.sqlite", seed, "2026.1")
    first, second = read(path), read(path)
    assert len(readings) == 1
    assert_same(first, second)
    assert_same(first, read(path, cache=False))
    assert project(second).equals(project(first))
    moved = shutil.copy(path, tmp_path / "moved-r2.sqlite")  # the same contents under another name
    third = read(moved)
    assert len(readings) == 2
    assert third.source.files == ("moved-r2.sqlite",)
    assert third.processes["rank"].unique().tolist() == [2]
    chrome_trace = chrome(tmp_path, "trace.json")
    assert_same(read(chrome_trace), read(chrome_trace))
    assert [folder.name.startswith(".") for folder in cached.iterdir()] == [False, False]


def test_changed_contents_are_read_again(cached: Path, readings: Sequence[Path], tmp_path: Path) -> None:
    path = rank(tmp_path, "a.sqlite", EPOCH_NS)
    assert read(path).ranges["name"].tolist() == ["decode/embed"]
    rank(tmp_path, "a.sqlite", EPOCH_NS, "decode/sample")
    assert read(path).ranges["name"].tolist() == ["decode/sample"]
    assert len(readings) == 2


def test_a_changed_reader_reads_again(
    cached: Path, readings: Sequence[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rank(tmp_path, "a.sqlite", EPOCH_NS)
    read(path)
    monkeypatch.setattr(kept_results, "_code_digest", lambda: "of another version")
    read(path)
    assert len(readings) == 2
    assert [folder.name.partition("-")[2] for folder in cached.iterdir()] == ["of another v"]


def test_the_key_covers_all_code_that_a_trace_depends_on() -> None:
    used, new = set(), {"labkit.nsys.reader.reading"}
    while new:
        used |= new
        new = {statement.module for name in new for statement in imports(name) if statement.module in modules()} - used
    assert {modules()[name] for name in used} <= set(kept_results.CODE)


def test_what_a_killed_process_was_writing_is_removed(cached: Path, tmp_path: Path) -> None:
    (cached / ".writing-dead").mkdir(parents=True)
    read(rank(tmp_path, "a.sqlite", EPOCH_NS))
    assert [folder.name.startswith(".") for folder in cached.iterdir()] == [False]


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "empty", "source", "nonsense"])
def test_a_damaged_cache_is_made_again(damage: str, cached: Path, readings: Sequence[Path], tmp_path: Path) -> None:
    path = random_database(tmp_path / "run.sqlite", 1, "2022.4")
    expected = read(path)
    (folder,) = cached.iterdir()
    file = folder / "ranges.arrow"
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[len(content) // 2] ^= 0x40
        file.write_bytes(content)
    elif damage == "remove":
        file.unlink()
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "source":
        (folder / "about.json").write_text('{"about": {}}')
    else:
        (folder / "about.json").write_text("not JSON")
    assert_same(read(path), expected)
    assert len(readings) == 2
    assert_same(read(path), expected)
    assert len(readings) == 2


def test_a_cache_that_cannot_be_written_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_results, "SMALLEST_BYTES", 0)
    file = tmp_path / "a file, no folder"
    file.touch()
    monkeypatch.setenv("LABKIT_CACHE", str(file / "below"))
    path = rank(tmp_path, "a.sqlite", EPOCH_NS)
    assert_same(read(path), read(path, cache=False))


def test_a_full_disk_leaves_no_half_of_a_cache(cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rank(tmp_path, "a.sqlite", EPOCH_NS)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(kept_results.pa.ipc, "new_file", full)
        assert_same(read(path), read(path, cache=False))
    assert list(cached.iterdir()) == []


def test_small_files_are_not_worth_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    read(rank(tmp_path, "a.sqlite", EPOCH_NS))
    assert not (tmp_path / "cache").exists()


def test_without_a_variable_the_cache_is_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_results, "SMALLEST_BYTES", 0)
    monkeypatch.delenv("LABKIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    read(rank(tmp_path, "a.sqlite", EPOCH_NS))
    assert len(list((tmp_path / "xdg" / "labkit" / "traces").iterdir())) == 1


def test_reading_and_projecting_need_no_torch() -> None:
    code = (
        "import sys, labkit.figures, labkit.nsys as n; all(map(n.__getattr__, n.__all__)); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
