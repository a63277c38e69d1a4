"""Row by row the same as nsys's own reports, on random exports of every generation of the schema.

An nsys ends open ranges by the rule of its own version. So exports of the other generation are made such that both
rules agree.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path

import pandas as pd
import pytest
from nsight import NSYS, exported, needs_nsys
from nsys_databases import random_database
from nsys_exports import GENERATIONS
from nsys_stats import KERNELS, NULL, STACK, SUMMARY, TRACE, Row, is_old, reports, rows_of_labkit, rows_of_nsys, stack
from sweeps import swept

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
DATABASES, BATCHES = 201, 9  # a third of each generation; all exports of a batch are of one
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
    """What nsys records of a program with ranges in ranges, of two domains."""
    assert NSYS is not None
    return exported(NSYS, [sys.executable, "-P", "-c", PROGRAM], tmp_path_factory.mktemp("recorded"))


@needs_nsys
def test_a_real_capture_is_read_as_nsys_reads_it(recorded: Path) -> None:
    assert NSYS is not None
    theirs = stack(NSYS, recorded)
    assert len(theirs) == 1 + 5 * 3
    assert same_stack(recorded, theirs)["name"].iloc[0] == "labkit:decode"


@needs_nsys
@pytest.mark.parametrize("path", sorted(PROFILES.glob("**/*.sqlite")), ids=lambda path: path.stem)
def test_captures_in_profiles_are_read_as_nsys_reads_them(path: Path) -> None:
    assert NSYS is not None
    same_stack(path, stack(NSYS, path))


def same_stack(path: Path, theirs: list[dict[str, object]]) -> pd.DataFrame:
    projected = project(read(path, cache=False)).sort_values("range_id", kind="stable")
    by_id = sorted(rows_of_nsys(theirs, STACK), key=lambda row: row[list(STACK).index("RangeId")])  # type: ignore[arg-type, return-value]
    same(path, rows_of_labkit(projected, STACK), by_id)
    return projected


def compared(path: Path, told: dict[str, list[dict[str, object]]]) -> int:
    """Compares all reports of an export and returns how many rows they have."""
    trace = read(path, cache=False)
    # nsys since 2023 has a row for all work outside ranges, without a range's number.
    theirs = rows_of_nsys([row for row in told["trace"] if row["RangeId"] not in NULL], TRACE)
    projected = project(trace)
    ours = rows_of_labkit(projected, TRACE) if trace.on_gpu else []
    by_id = list(TRACE).index("RangeId")
    same(path, sorted(ours, key=lambda row: row[by_id]), sorted(theirs, key=lambda row: row[by_id]))  # type: ignore[arg-type, return-value]

    theirs_kernels, ours_kernels = (
        rows_of_nsys(told["kernels"], KERNELS),
        rows_of_labkit(kernel_summary(trace), KERNELS),
    )
    if told["kernels"]:
        same(path, sorted(ours_kernels, key=group), sorted(theirs_kernels, key=group))
        assert [in_order(row) for row in ours_kernels] == [in_order(row) for row in theirs_kernels]

    if trace.on_gpu:
        summary = rows_of_labkit(projection_summary(trace), SUMMARY)
        expected = rows_of_nsys(told["summary"], SUMMARY) if "summary" in told else summarised(theirs)
        same(path, sorted(summary, key=group), sorted(expected, key=group))
        assert [row[2] for row in summary] == sorted((row[2] for row in expected), reverse=True)  # type: ignore[type-var]
    return len(theirs) + len(theirs_kernels)


def same(path: Path, ours: list[Row], theirs: list[Row]) -> None:
    assert len(ours) == len(theirs), f"{path.name}: {len(ours)} rows, nsys has {len(theirs)}"
    for mine, own in zip(ours, theirs, strict=True):
        for one, other in zip(mine, own, strict=True):
            close = isinstance(one, float) and abs(one - float(other)) <= TENTH  # type: ignore[arg-type]
            assert one == other or close, f"{path.name}: {mine}, nsys has {own}"


def group(row: Row) -> tuple[str, ...]:
    return tuple(map(str, row[:5]))


def in_order(row: Row) -> Row:
    """Columns that a kernel summary is sorted by."""
    columns = list(KERNELS)
    return tuple(row[columns.index(name)] for name in ("NVTX Range", "PID", "TID", "Total Time (ns)"))


def summarised(rows: list[Row]) -> list[Row]:
    """The summary of nsys's trace, for versions that have none."""
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
