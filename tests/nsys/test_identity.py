"""Projections equal nsys's own reports row by row, on random exports of every generation of the schema.

nsys ends open ranges by the rule of its own version, so exports of the other generation are made such that both
rules agree.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path

import pandas as pd
import pytest
from helpers.nsys.nsight import NSYS, exported, needs_nsys
from helpers.nsys.nsys_stats import (
    KERNELS,
    NULL,
    STACK,
    SUMMARY,
    TRACE,
    Row,
    is_old,
    reports,
    rows_of_labkit,
    rows_of_nsys,
    stack,
)
from helpers.sweeps import swept
from helpers.traces.nsys_databases import random_database
from helpers.traces.nsys_exports import GENERATIONS

from labkit.nsys.analysis.projection import kernel_summary, project, projection_summary
from labkit.nsys.reader.reading import read

PROFILES = Path(__file__).parents[2] / "profiles"
PROGRAM = """
import nvtx
with nvtx.annotate("decode", domain="labkit"):
    for step in range(5):
        with nvtx.annotate("decode/step", domain="labkit"), nvtx.annotate(f"step {step}", domain="other"):
            with nvtx.annotate("decode/layer.0/qkv", domain="labkit"):
                pass
"""
DATABASES, BATCHES = 201, 9  # a third of each generation; a batch has one generation
TENTH = 0.05 + 1e-6  # nsys rounds means and deviations to tenths


@needs_nsys
@pytest.mark.parametrize("batch", swept(range(BATCHES), ["0"]))
def test_two_hundred_random_exports_are_projected_as_nsys_does(batch: int, tmp_path: Path) -> None:
    assert NSYS is not None
    rows = 0
    for seed in range(batch, DATABASES, BATCHES):
        generation = list(GENERATIONS)[seed % len(GENERATIONS)]
        settled = is_old(NSYS) != (generation == "2022.4")
        path = random_database(tmp_path / f"{seed}.sqlite", seed, generation, settled=settled)
        rows += compared(path, reports(NSYS, path))
    assert rows > 500


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report by nsys of a program with nested ranges of two domains."""
    assert NSYS is not None
    return exported(NSYS, [sys.executable, "-P", "-c", PROGRAM], tmp_path_factory.mktemp("recorded"))


@needs_nsys
def test_a_real_capture_is_read_as_nsys_reads_it(recorded: Path) -> None:
    assert NSYS is not None
    nsys_rows = stack(NSYS, recorded)
    assert len(nsys_rows) == 1 + 5 * 3
    assert same_stack(recorded, nsys_rows)["name"].iloc[0] == "labkit:decode"


@needs_nsys
@pytest.mark.parametrize("path", sorted(PROFILES.glob("**/*.sqlite")), ids=lambda path: path.stem)
def test_captures_in_profiles_are_read_as_nsys_reads_them(path: Path) -> None:
    assert NSYS is not None
    if read(path, cache=False).on_gpu:
        assert compared(path, reports(NSYS, path)) > 0
    else:
        same_stack(path, stack(NSYS, path))


def same_stack(path: Path, nsys_rows: list[dict[str, object]]) -> pd.DataFrame:
    projected = project(read(path, cache=False)).sort_values("range_id", kind="stable")
    by_id = sorted(rows_of_nsys(nsys_rows, STACK), key=lambda row: row[list(STACK).index("RangeId")])  # type: ignore[arg-type, return-value]
    same(path, rows_of_labkit(projected, STACK), by_id)
    return projected


def compared(path: Path, nsys_reports: dict[str, list[dict[str, object]]]) -> int:
    """Compares all reports of an export and returns how many rows they have."""
    trace = read(path, cache=False)
    # nsys since 2023 has a row for all work outside ranges, without a range's number.
    nsys_trace = rows_of_nsys([row for row in nsys_reports["trace"] if row["RangeId"] not in NULL], TRACE)
    projected = project(trace)
    labkit_trace = rows_of_labkit(projected, TRACE) if trace.on_gpu else []
    by_id = list(TRACE).index("RangeId")
    same(path, sorted(labkit_trace, key=lambda row: row[by_id]), sorted(nsys_trace, key=lambda row: row[by_id]))  # type: ignore[arg-type, return-value]

    nsys_kernels, labkit_kernels = (
        rows_of_nsys(nsys_reports["kernels"], KERNELS),
        rows_of_labkit(kernel_summary(trace), KERNELS),
    )
    if nsys_reports["kernels"]:
        same(path, sorted(labkit_kernels, key=group), sorted(nsys_kernels, key=group))
        assert [in_order(row) for row in labkit_kernels] == [in_order(row) for row in nsys_kernels]

    if trace.on_gpu:
        summary = rows_of_labkit(projection_summary(trace), SUMMARY)
        expected = (
            rows_of_nsys(nsys_reports["summary"], SUMMARY) if "summary" in nsys_reports else summarised(nsys_trace)
        )
        same(path, sorted(summary, key=group), sorted(expected, key=group))
        assert [row[2] for row in summary] == sorted((row[2] for row in expected), reverse=True)  # type: ignore[type-var]
    return len(nsys_trace) + len(nsys_kernels)


def same(path: Path, labkit_rows: list[Row], nsys_rows: list[Row]) -> None:
    assert len(labkit_rows) == len(nsys_rows), f"{path.name}: {len(labkit_rows)} rows, nsys has {len(nsys_rows)}"
    for row, nsys_row in zip(labkit_rows, nsys_rows, strict=True):
        for value, expected in zip(row, nsys_row, strict=True):
            close = isinstance(value, float) and abs(value - float(expected)) <= TENTH  # type: ignore[arg-type]
            assert value == expected or close, f"{path.name}: {row}, nsys has {nsys_row}"


def group(row: Row) -> tuple[str, ...]:
    return tuple(map(str, row[:5]))


def in_order(row: Row) -> Row:
    """Columns that a kernel summary is sorted by."""
    columns = list(KERNELS)
    return tuple(row[columns.index(name)] for name in ("NVTX Range", "PID", "TID", "Total Time (ns)"))


def summarised(rows: list[Row]) -> list[Row]:
    """Summary computed from nsys's trace, for versions of nsys without that report."""
    groups: dict[tuple[object, object], list[dict[str, float]]] = defaultdict(list)
    for row in rows:
        columns = dict(zip(TRACE.values(), row, strict=True))
        if columns["name"] != "":
            groups[columns["name"], columns["style"]].append(columns)  # type: ignore[arg-type]
    return [(*key, *figures(of_group)) for key, of_group in groups.items()]


def figures(rows: list[dict[str, float]]) -> tuple[float, ...]:
    times = [row["duration_ns"] for row in rows]
    deviation = statistics.stdev(times) if len(times) > 1 else 0.0
    spread = (statistics.fmean(times), statistics.median(times), min(times), max(times), deviation)
    means = [statistics.fmean(row[column] for row in rows) for column in ("operations", "level", "children")]
    totals = sum(times), sum(row["range_duration_ns"] for row in rows), len(rows)
    return (*totals, *spread, sum(row["operations"] for row in rows), *means)
