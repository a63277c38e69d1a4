"""Kept summaries are reused for the same contents, and made anew for anything else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from traces import Recorder

from labkit.nsys.tables import kept_summary
from labkit.nsys.tables.kept_summary import summary_of
from labkit.nsys.tables.selection import Selection
from labkit.nsys.tables.summary import TraceSummary, summarise
from labkit.nsys.timeline.export import write_chrome
from labkit.nsys.trace import TraceError
from labkit.system.kept_folders import Bounds


@pytest.fixture
def computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[TraceSummary]:
    """List of summaries that were computed and not reused. Summaries of small files are kept too."""
    summaries: list[TraceSummary] = []

    def summarise_and_record(*arguments: object) -> TraceSummary:
        summaries.append(summarise(*arguments))  # type: ignore[arg-type]
        return summaries[-1]

    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_summary, "summarise", summarise_and_record)
    monkeypatch.setattr(kept_summary, "SMALLEST_BYTES", 0)
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


def test_a_damaged_summary_is_made_anew(computed: list[TraceSummary], tmp_path: Path) -> None:
    path = recorded(tmp_path)
    first = summary_of([path])
    (folder,) = (tmp_path / "cache" / "summaries").iterdir()
    (folder / "budget.parquet").write_bytes(b"half")
    same(first, summary_of([path]))
    same(first, summary_of([path]))
    assert len(computed) == 2


def test_the_key_has_all_code_that_a_summary_depends_on() -> None:
    program = (
        "import sys, labkit.nsys.tables.kept_summary as kept\n"
        "files = {module.__file__ for name, module in sys.modules.items() if name.startswith('labkit.')}\n"
        "print(*files - set(map(str, kept.CODE)))"
    )
    output = subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True, text=True).stdout
    assert not output.split()


def test_old_summaries_are_removed(
    computed: list[TraceSummary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_summary, "BOUNDS", Bounds(folders=2))
    for kernels in range(1, 5):
        summary_of([recorded(tmp_path, kernels)])
    assert len(list((tmp_path / "cache" / "summaries").glob("[!.]*"))) == 2


def test_a_missing_file_is_reported_as_usual(computed: list[TraceSummary], tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="which does not exist"):
        summary_of([tmp_path / "none.json"])
    assert not computed
