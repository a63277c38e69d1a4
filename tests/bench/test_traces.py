"""The benchmark measures exports of the requested size, and the reader finds all operations in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.sweeps import sweep

from labkit.bench import traces as bench
from labkit.bench.trace_export import Size, write_export
from labkit.nsys.analysis.attribution import attribute
from labkit.nsys.analysis.projection import project
from labkit.nsys.reader.reading import read


@pytest.mark.parametrize("size", [Size(ranges=1000, kernels=230), Size(ranges=1000, kernels=5003)], ids=str)
def test_an_export_has_what_was_asked_for(size: Size, tmp_path: Path) -> None:
    trace = read(write_export(tmp_path / "made.sqlite", size), cache=False)
    assert (len(trace.ranges), len(trace.operations), len(trace.calls)) == (size.ranges, size.kernels, size.kernels)
    assert trace.source.skipped == ()
    assert attribute(trace).coverage == 1.0
    rows = project(trace)
    assert rows.loc[rows["level"] == 1, "operations"].sum() == size.kernels
    assert set(rows["name"]) > {"labkit:decode/step", "labkit:decode/layer.0/qkv"}


@sweep
def test_each_figure_has_its_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LARGE", Size(ranges=60, kernels=90))
    checks = [*bench.measured(tmp_path, Size(ranges=60, kernels=30), 1), *bench.measured(tmp_path, bench.LARGE, 1)]
    assert [check.bar for check in checks] == ["≤ 0.15 s", "≤ 12 s", "≤ 2 GiB", "≤ 1 s"]
    assert all(float(check.figure.split()[0]) >= 0 for check in checks)
