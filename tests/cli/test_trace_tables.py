"""Every command of `labkit trace` shows the tables of the catalogue, and sorts them by any of their columns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.processes.command_line import Labkit, command_line
from helpers.sweeps import swept
from helpers.traces.handmade import Recorder

from labkit.nsys.tables.catalogue import COMMANDS, COMPARED, UNIT_TIMES, TraceTable
from labkit.nsys.timeline.export import write_chrome
from labkit.nsys.trace import Trace

STEPS = 12
TABLES = {name: command.tables for name, command in COMMANDS.items()} | {"compare": COMPARED}
SHOWN = [
    pytest.param(command, table, id=f"{command}-{table.name}") for command, tables in TABLES.items() for table in tables
]


@pytest.fixture
def labkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    """Runs a command line. Traces are read, and tables are made, only once for all of this file's tests."""
    monkeypatch.chdir(tmp_path)
    for module, function in MADE:
        once = partial(made_once, getattr(import_module(module), function))
        monkeypatch.setattr(import_module(module), function, once)
    return command_line(monkeypatch, capsys)


MADE = (
    ("labkit.nsys.reader.reading", "read"),
    ("labkit.nsys.tables.trace_tables", "trace_tables"),
    ("labkit.nsys.tables.summary", "summary_of"),
    ("labkit.nsys.tables.compare", "compare_traces"),
)
RESULTS: dict[object, Any] = {}


def made_once(function: Callable[..., Any], *arguments: Any) -> Any:
    key = (function, *(id(value) if isinstance(value, Trace) else str(value) for value in arguments))
    if key not in RESULTS:
        RESULTS[key] = function(*arguments)
    return RESULTS[key]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Files of two traces; the second has fewer steps."""
    folder = tmp_path_factory.mktemp("traces")
    return recorded(folder / "a.json", STEPS), recorded(folder / "b.json", STEPS - 2)


def recorded(path: Path, steps: int) -> str:
    """A trace of two ranks with rows for every table: ranges, operators, kernels, copies, all-reduces, system calls."""
    recorder = Recorder()
    for rank in range(2):
        on_gpu: dict[str, Any] = {"process": rank, "device": rank}
        for step in range(steps):
            at = 400 * step
            recorder.range(f"step {step}", at, at + 390, process=rank, domain="")
            recorder.operator(f"aten::op{step % 3}", at, at + 40 + rank, process=rank)
            recorder.kernel(at + 5, at + 12, at + 15 + step % 5, name=f"kernel_{step % 4 * 5}", **on_gpu)
            recorder.kernel(at + 60, at + 70, at + 75 + 7 * step, name="DtoH" if step % 2 else "HtoD", **on_gpu)
            recorder.operations[-1] |= {"kind": "memcpy", "bytes": 4096 * (step + 1), "memory": "Pageable -> Device"}
            arrives = at + 200 + rank * step
            name = "ncclDevKernel_AllReduce_Sum_f16"
            recorder.kernel(arrives, arrives + 5, at + 250 + step, name=name, **on_gpu)
            times = {"start_ns": 1000 * at, "end_ns": 1000 * at + 900 + step, "tid": 1}
            recorder.calls.append({**times, "process": rank, "kind": "os", "name": f"poll{step % 3}"})
    return str(write_chrome(recorder.trace(ranks=(0, 1)), path))


def run(labkit: Labkit, command: str, traces: tuple[str, str], *options: str) -> dict[str, list[dict[str, Any]]]:
    files = traces if command == "compare" else traces[:1]
    code, output, errors = labkit("trace", command, *files, "--json", *options)
    assert code == 0, errors
    tables: dict[str, list[dict[str, Any]]] = json.loads(output)
    return tables


def order(value: Any) -> Any:
    """Numbers as they are, and texts by their words and the numbers in them."""
    if not isinstance(value, str):
        return value
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", value)]


def check_sorted(rows: list[dict[str, Any]], column: str, *, ascending: bool = False) -> None:
    values = [row[column] for row in rows]
    known = [order(value) for value in values if value is not None]
    assert values[len(known) :] == [None] * (len(values) - len(known))
    for first, second in pairwise(known[::-1] if ascending else known):
        assert first >= second, values


@pytest.mark.parametrize("command", TABLES)
def test_a_command_shows_the_tables_of_the_catalogue(command: str, labkit: Labkit, traces: tuple[str, str]) -> None:
    document = run(labkit, command, traces)
    for table in TABLES[command]:
        assert document[table.name], table.name
        assert tuple(document[table.name][0]) == table.columns
        assert set(table.shown) | set(table.kernels) <= set(table.columns)


@pytest.mark.parametrize("columns", swept({"shown": "shown", "all": "columns"}, ["shown"]))
@pytest.mark.parametrize(("command", "table"), SHOWN)
def test_any_table_is_sorted_by_any_of_its_columns(
    command: str, table: TraceTable, columns: str, labkit: Labkit, traces: tuple[str, str]
) -> None:
    before = run(labkit, command, traces)
    for column in getattr(table, columns):
        after = run(labkit, command, traces, "--sort", f"{table.name}.{column}")
        check_sorted(after[table.name], column)
        assert sorted(map(str, after[table.name])) == sorted(map(str, before[table.name]))
        assert after | {table.name: []} == before | {table.name: []}
    upwards = run(labkit, command, traces, "--sort", f"{table.name}.{table.columns[0]}", "--ascending")
    check_sorted(upwards[table.name], table.columns[0], ascending=True)


@pytest.mark.parametrize("command", TABLES)
def test_a_column_without_its_table_sorts_each_table_that_has_it(
    command: str, labkit: Labkit, traces: tuple[str, str]
) -> None:
    column = TABLES[command][-1].columns[1]
    after = run(labkit, command, traces, "--sort", column)
    for table in TABLES[command]:
        if column in table.columns:
            check_sorted(after[table.name], column)


@pytest.mark.parametrize("command", TABLES)
def test_a_column_that_no_table_has_is_refused_before_the_trace_is_read(command: str, labkit: Labkit) -> None:
    files = ["none.json"] * (2 if command == "compare" else 1)
    tables: tuple[TraceTable, ...] = TABLES[command]
    for text in ("bogus", f"{tables[0].name}.bogus", f"bogus.{tables[0].columns[0]}"):
        code, _, errors = labkit("trace", command, *files, "--sort", text)
        assert code == 2
        assert f"got --sort {text}" in errors
        assert "expected a column" in errors
        listed = dict(line.strip().split(": ") for line in errors.splitlines()[1:])
        assert listed == {table.name: ", ".join(table.columns) for table in tables}


@pytest.mark.parametrize(
    ("command", "text", "table", "column"),
    [
        ("kernels", "total", "kernels", "total_ns"),
        ("kernels", "Total-NS", "kernels", "total_ns"),
        ("cuda_gpu_kern_sum", "med", "cuda_gpu_kern_sum", "Med (ns)"),
        ("cuda_gpu_kern_sum", "time", "cuda_gpu_kern_sum", "Time (%)"),
        ("compare", "of-ranges.a", "of ranges", "a_ns"),
    ],
)
def test_units_and_spelling_of_a_column_may_be_left_out(
    command: str, text: str, table: str, column: str, labkit: Labkit, traces: tuple[str, str]
) -> None:
    check_sorted(run(labkit, command, traces, "--sort", text)[table], column)


def test_a_mistyped_column_of_a_table_has_a_suggestion(labkit: Labkit) -> None:
    errors = labkit("trace", "summary", "none.json", "--sort", "kernels.totl")[2]
    assert "got --sort kernels.totl (did you mean 'kernels.total'" in errors.replace("\n", " ")


def test_times_of_one_unit_are_refused_if_there_is_none(labkit: Labkit, tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.kernel(0, 5, 10)
    path = str(write_chrome(recorder.trace(), tmp_path / "one.json"))
    code, _, errors = labkit("trace", "compare", path, path, "--sort", UNIT_TIMES[0])
    assert code == 2
    assert f"so there is no {UNIT_TIMES[0]}" in errors.replace("\n", " ")
