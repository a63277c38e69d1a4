"""`make bench`, the part about traces: time and memory of reading and projecting large traces.

python -P -m labkit.bench.traces [--rounds N]

Two synthetic exports are opened and projected, and a larger one is summed up, each time in a fresh process. Times are
of the calls, without the start of Python; only the summary's time is of the whole command. Memory is the peak of the
process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from labkit.bench.bars import GIB, SECONDS, BarCheck, at_most
from labkit.bench.page import print_checks
from labkit.bench.trace_export import Size, write_export
from labkit.system.child import run_child
from labkit.system.command import run_command

ROUNDS = 3
SMALL, LARGE = Size(ranges=17_000, kernels=3_400), Size(ranges=200_000, kernels=1_000_000)
FIVE_MILLION = Size(ranges=600_000, kernels=2_200_000)  # and one call per kernel
CHILD = """
import json, resource, sys, time
from labkit.nsys.analysis.projection import project
from labkit.nsys.reader.reading import read
began = time.perf_counter()
trace = read(sys.argv[1])
opened = time.perf_counter()
project(trace)
ended = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
took = {"open_s": opened - began, "project_s": ended - opened, "peak_mib": peak}
sys.stdout.write(json.dumps(took))
"""


SUMMARY = """
import resource, subprocess, sys, time
began = time.perf_counter()
run = [sys.executable, "-P", "-c", "from labkit.cli.main import main; main()", *sys.argv[1:]]
subprocess.run(run, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
took = time.perf_counter() - began
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
sys.stdout.write(f"{took} {peak}")
"""


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Processes for each figure, which is their median.")] = ROUNDS,
) -> None:
    """Measure reading and projecting a small and a large export."""
    with tempfile.TemporaryDirectory(prefix="labkit-bench-") as folder:
        for size in (SMALL, LARGE):
            print_checks(measured(Path(folder), size, rounds))
        print_checks(summed_up(Path(folder), rounds))


def measured(folder: Path, size: Size, rounds: int) -> Iterator[BarCheck]:
    """The checks of an export of this size. The export and its caches are made in `folder`."""
    path = write_export(folder / f"{size.kernels}.sqlite", size)
    first = [took(path, folder / f"cache-{size.kernels}-{number}") for number in range(rounds)]
    open_s, project_s, peak_mib = (_median(first, field) for field in ("open_s", "project_s", "peak_mib"))
    if size.kernels < LARGE.kernels:
        yield at_most(f"{size}: project", project_s, 0.15, SECONDS)
        return
    again = [took(path, folder / f"cache-{size.kernels}-0") for _ in range(rounds)]
    yield at_most(f"{size}: open {open_s:.2f} s, project {project_s:.2f} s", open_s + project_s, 12, SECONDS)
    yield at_most(f"{size}: memory", peak_mib / 1024, 2, GIB)
    yield at_most(f"{size}: open again", _median(again, "open_s"), 1, SECONDS)


def summed_up(folder: Path, rounds: int) -> Iterator[BarCheck]:
    """The checks of `labkit trace summary` on an export of five million rows."""
    path = write_export(folder / "summary.sqlite", FIVE_MILLION)
    first = [_summary(path, folder / f"cache-summary-{number}") for number in range(rounds)]
    again = [_summary(path, folder / "cache-summary-0")[0] for _ in range(rounds)]
    yield at_most(f"{FIVE_MILLION}: summary", median(seconds for seconds, _ in first), 20, SECONDS)
    yield at_most(f"{FIVE_MILLION}: memory of the summary", median(mib for _, mib in first) / 1024, 2, GIB)
    yield at_most(f"{FIVE_MILLION}: summary again", median(again), 1, SECONDS)


def _summary(path: Path, cache: Path) -> tuple[float, float]:
    command = [sys.executable, "-P", "-c", SUMMARY, "trace", "summary", str(path)]
    environment = {**os.environ, "LABKIT_CACHE": str(cache)}
    seconds, mib = map(float, run_child(command, f"{path} could not be summed up", environment=environment).split())
    return seconds, mib


def took(path: Path, cache: Path) -> dict[str, float]:
    """Opens and projects the export in a new process; returns what CHILD prints."""
    command = [sys.executable, "-P", "-c", CHILD, str(path)]
    environment = {**os.environ, "LABKIT_CACHE": str(cache)}
    figures: dict[str, float] = json.loads(run_child(command, f"{path} could not be read", environment=environment))
    return figures


def _median(processes: Sequence[dict[str, float]], field: str) -> float:
    return median(process[field] for process in processes)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
