"""Kept results are reused for the same contents, made anew for anything else, and within bounds of size and age."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from helpers.traces.handmade import Recorder

from labkit.nsys import kept_results
from labkit.nsys.kept_results import DAY_S, Bounds, remove_old
from labkit.nsys.tables import summary as summary_module
from labkit.nsys.tables.selection import Selection
from labkit.nsys.tables.summary import TraceSummary, summarise, summary_of
from labkit.nsys.timeline.export import write_chrome
from labkit.nsys.trace import TraceError


@pytest.fixture
def computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[TraceSummary]:
    """List of summaries that were computed and not reused. Summaries of small files are kept too."""
    summaries: list[TraceSummary] = []

    def summarise_and_record(*arguments: object) -> TraceSummary:
        summaries.append(summarise(*arguments))  # type: ignore[arg-type]
        return summaries[-1]

    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(summary_module, "summarise", summarise_and_record)
    monkeypatch.setattr(kept_results, "SMALLEST_BYTES", 0)
    return summaries


def recorded(folder: Path, kernels: int = 3) -> Path:
    recorder = Recorder()
    recorder.range("forward", 0, 50, domain="")
    for index in range(kernels):
        recorder.kernel(index, 10 + 20 * index, 15 + 20 * index)
    return write_chrome(recorder.trace(), folder / "made.json")


def same(first: TraceSummary, second: TraceSummary) -> None:
    assert (first.source, first.remarks) == (second.source, second.remarks)
    for name, frame in first.frames.items():
        pd.testing.assert_frame_equal(frame, second.frames[name], check_dtype=False, check_categorical=False)


def test_a_summary_is_found_again(computed: list[TraceSummary], tmp_path: Path) -> None:
    path = recorded(tmp_path)
    first = summary_of([path])
    same(first, summary_of([path]))
    assert len(computed) == 1
    summary_of([path], Selection(window_ns=(0, 30_000)))
    assert len(computed) == 2
    recorded(tmp_path, kernels=4)
    assert summary_of([path]).kernels["count"].tolist() == [4]
    assert len(computed) == 3


def summary_folder(tmp_path: Path) -> Path:
    """The kept summary. The trace itself is kept next to it."""
    (file,) = (tmp_path / "cache" / "traces").glob("*/budget.arrow")
    return file.parent


def test_a_damaged_summary_is_made_anew(computed: list[TraceSummary], tmp_path: Path) -> None:
    path = recorded(tmp_path)
    first = summary_of([path])
    summary_folder(tmp_path).joinpath("budget.arrow").write_bytes(b"half")
    same(first, summary_of([path]))
    same(first, summary_of([path]))
    assert len(computed) == 2


def test_the_key_has_all_code_that_a_summary_depends_on() -> None:
    program = (
        "import sys, labkit.nsys.kept_results as kept, labkit.nsys.tables.summary\n"
        "files = {module.__file__ for name, module in sys.modules.items() if name.startswith('labkit.')}\n"
        "print(*files - set(map(str, kept.CODE)))"
    )
    output = subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True, text=True).stdout
    assert not output.split()


def test_old_results_are_removed(computed: list[TraceSummary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_results, "BOUNDS", Bounds(size_bytes=0))
    for kernels in range(1, 5):
        summary_of([recorded(tmp_path, kernels)])
    (kept,) = (tmp_path / "cache" / "traces").glob("[!.]*")
    assert kept == summary_folder(tmp_path)


def test_other_code_replaces_a_result(
    computed: list[TraceSummary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recorded(tmp_path)
    summary_of([path])
    before = summary_folder(tmp_path)
    monkeypatch.setattr(kept_results, "_code_digest", lambda: "of other code")
    summary_of([path])
    assert len(computed) == 2
    assert summary_folder(tmp_path) != before


def test_a_missing_file_is_reported_as_usual(computed: list[TraceSummary], tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="which does not exist"):
        summary_of([tmp_path / "none.json"])
    assert not computed


def folder_of(parent: Path, name: str, days: float, size: int = 10) -> Path:
    """Makes a folder with one file, last used `days` days ago."""
    folder = parent / name
    folder.mkdir()
    (folder / "data").write_bytes(b"x" * size)
    last_use = time.time() - days * DAY_S
    os.utime(folder, (last_use, last_use))
    return folder


@pytest.mark.parametrize(
    ("bounds", "remaining"),
    [
        (Bounds(), {"new", "a", "b", "c"}),
        (Bounds(size_bytes=35), {"new", "a", "b"}),
        (Bounds(size_bytes=25), {"new", "a"}),
        (Bounds(size_bytes=5), {"new"}),
        (Bounds(unused_days=2), {"new", "a"}),
    ],
)
def test_what_was_unused_for_the_longest_goes_first(bounds: Bounds, remaining: set[str], tmp_path: Path) -> None:
    for days, name in enumerate("abc", 1):
        folder_of(tmp_path, name, days)
    (tmp_path / ".writing-x").mkdir()
    (tmp_path / "file").touch()
    remove_old(tmp_path, bounds, keep=folder_of(tmp_path, "new", 99))
    assert {folder.name for folder in tmp_path.iterdir()} == {*remaining, ".writing-x", "file"}


def test_no_older_result_stays_in_place_of_a_newer_one(tmp_path: Path) -> None:
    for days, size in ((1, 10), (2, 30), (3, 10)):
        folder_of(tmp_path, str(days), days, size)
    remove_old(tmp_path, Bounds(size_bytes=35), keep=folder_of(tmp_path, "new", 0))
    assert {folder.name for folder in tmp_path.iterdir()} == {"new", "1"}


def test_use_makes_a_result_new_again(computed: list[TraceSummary], tmp_path: Path) -> None:
    path = recorded(tmp_path)
    summary_of([path])
    folder = summary_folder(tmp_path)
    os.utime(folder, (0, 0))
    summary_of([path])
    assert time.time() - folder.stat().st_mtime < DAY_S
    assert len(computed) == 1
