"""The notebooks of the lab: their parameters, their controls, and their pages after a run by `labkit run`."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from helpers.notebooks.notebook_cases import CASES, NotebookCase
from helpers.notebooks.pages import MOST_BYTES, Page
from helpers.sweeps import sweep
from nbformat.v4 import new_code_cell, new_notebook

from labkit.notebooks import RunReport, checked_values, read_parameters
from labkit.notebooks.parameters import TAG, parameters_cell
from labkit.system.errors import UserError
from labkit.widgets import (
    KernelBench,
    ParallelBench,
    PipelineBench,
    PrecisionBench,
    StreamingBench,
    TraceBench,
    Workbench,
)
from labkit.widgets.controls import Controls

Reports = Callable[[str], RunReport]
each_notebook = pytest.mark.parametrize("number", CASES)


def code_cells(case: NotebookCase) -> list[Any]:
    return [cell for cell in nbformat.read(case.path, as_version=4).cells if cell.cell_type == "code"]


def test_every_notebook_is_listed() -> None:
    assert [case.path for case in CASES.values()] == sorted(Path(CASES["01"].path).parent.glob("*.ipynb"))


@each_notebook
def test_the_parameters_cell_is_made_from_the_settings_of_the_study(number: str) -> None:
    """`tools/parameter_cells.py` writes it."""
    case = CASES[number]
    (cell,) = [cell for cell in code_cells(case) if TAG in cell.metadata.get("tags", [])]
    assert cell.source == parameters_cell(case.bench.declared)
    parameters = {parameter.name: parameter for parameter in read_parameters(nbformat.read(case.path, as_version=4))}
    assert parameters.keys() == case.bench.declared.keys()
    for name, setting in case.bench.declared.items():
        parameter = parameters[name]
        declared = (setting.kind.__name__, setting.default, setting.help)
        assert (parameter.type, parameter.default, parameter.help) == declared
        assert parameter.help


@each_notebook
def test_no_other_cell_assigns_a_setting(number: str) -> None:
    """The bench takes its settings from the names of the notebook."""
    for cell in code_cells(CASES[number]):
        if TAG not in cell.metadata.get("tags", []):
            assert not set(re.findall(r"^(\w+)\b.*? = ", cell.source, flags=re.MULTILINE)) & set(
                CASES[number].bench.declared
            )


@each_notebook
def test_every_setting_has_a_control_with_help(number: str) -> None:
    bench = CASES[number].bench
    settings = bench(**CASES[number].settings).settings
    controls = Controls(bench.declared, settings, lambda settings, follow: None)
    assert settings.keys() == bench.declared.keys()
    assert controls.settings == settings
    assert all(control.tooltip for control in controls._inputs.values())


@each_notebook
def test_a_bench_takes_its_settings_from_the_names_of_a_notebook(number: str) -> None:
    case = CASES[number]
    settings = case.bench.of(case.settings | {"other": 1}).settings
    assert settings == case.bench(**case.settings).settings
    if "source" not in case.settings:
        assert settings == {name: item.default for name, item in case.bench.declared.items()} | case.settings


@each_notebook
@sweep
@pytest.mark.timeout(240)
def test_it_runs_and_says_what_it_measured(number: str, report_of: Reports) -> None:
    report = report_of(number)
    assert report.failure is None, report.failure
    (headline,) = report.headlines
    assert re.search(CASES[number].headline, headline)


@each_notebook
@sweep
@pytest.mark.timeout(240)
def test_the_page_has_all_figures_and_loads_nothing(number: str, report_of: Reports) -> None:
    case, html = CASES[number], report_of(number).html.read_text()
    page = Page(html)
    assert page.outside == []
    assert len(page.figures) == case.figures
    assert len(page.libraries) == 1
    assert len(html) < MOST_BYTES
    assert all(text in page.text or text in html for text in case.texts)
    assert page.text.count("not answered yet") == case.unanswered


@pytest.mark.parametrize(
    ("bench", "settings", "message"),
    [
        (Workbench, {"batch": "8"}, "got batch = '8', expected int"),
        (Workbench, {"model": None}, "got model = None, expected str"),
        (Workbench, {"rounds": 100}, "got rounds = 100, expected 0 to 99"),
        (ParallelBench, {"rounds": 100}, "got rounds = 100, expected 0 to 99"),
        (PipelineBench, {"rounds": 1}, "got rounds = 1, expected 2 to 99"),
        (Workbench, {"batch": 0}, "got batch = 0, expected 1 to 256"),
        (Workbench, {"threads": -1}, "got threads = -1, expected 0 to 256"),
        (Workbench, {"batches": 1}, "unknown setting 'batches' .*'batch'.*; expected model, dtype"),
        (KernelBench, {"context": 1.5}, "got context = 1.5, expected int"),
        (TraceBench, {"steps": True}, "got steps = True, expected int"),
        *(
            (ParallelBench, {"tp_sizes": text}, f"got tp_sizes = '{text}', expected numbers of ranks")
            for text in ("", "1", "two", "0,2", "1;2")
        ),
        (ParallelBench, {"tp_sizes": None}, "got tp_sizes = None, expected str"),
        (PrecisionBench, {"precisions": "int8"}, "expected two or more"),
        (PrecisionBench, {"precisions": "float32, int5"}, "unknown precision 'int5' .*; expected"),
        (PrecisionBench, {"precisions": [["float32"]]}, "unknown precision"),
        (StreamingBench, {"batches": " , "}, "expected numbers of sequences"),
        (StreamingBench, {"batches": {"a": 1}}, "got batches = {'a': 1}, expected str"),
        (StreamingBench, {"precision": "int5"}, "unknown precision"),
        (StreamingBench, {"precision": 4}, "unknown precision"),
        (StreamingBench, {"memory_gb": 0.0}, "got memory_gb = 0.0, expected 0.001 to 100000"),
        (StreamingBench, {"memory_gb": float("nan")}, "got memory_gb = nan, expected 0.001 to"),
        (StreamingBench, {"memory_gb": "one"}, "got memory_gb = 'one', expected float"),
        (StreamingBench, {"rounds": True}, "got rounds = True, expected int"),
        (PipelineBench, {"schedules": "queue, best"}, "expected some of queue, rounds, barrier, naive"),
        (PipelineBench, {"schedules": " , "}, "expected some of queue"),
        (PipelineBench, {"schedules": 3.5}, "expected some of queue"),
        (PipelineBench, {"micro_batches": "two"}, "expected numbers of micro-batches"),
        (PipelineBench, {"stages": 1}, "got stages = 1, expected 2 to 64"),
        (PipelineBench, {"batch": 4.0}, "got batch = 4.0, expected int"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_wrong_settings_are_refused_before_anything_runs(bench: Any, settings: dict[str, Any], message: str) -> None:
    """A control would silently take the nearest value instead. A wrong type is also a TypeError."""
    with pytest.raises(UserError, match=message) as error_info:
        bench(**({"model": "tiny-gpt2"} | settings))
    assert isinstance(error_info.value, TypeError) == bool(re.search("expected (int|str|float)$", message))


@pytest.mark.parametrize(
    ("bench", "options", "expected"),
    [
        (StreamingBench, {"memory_gb": 1, "batches": 4}, {"memory_gb": 1.0, "batches": "4"}),
        (StreamingBench, {"batches": [1, 4], "baselines": ["hf-disk"]}, {"batches": "1, 4", "baselines": "hf-disk"}),
        (ParallelBench, {"tp_sizes": (1, 2)}, {"tp_sizes": "1, 2"}),
        (PipelineBench, {"micro_batches": 4, "schedules": ["queue"]}, {"micro_batches": "4", "schedules": "queue"}),
        (PrecisionBench, {"precisions": ["float32", "int8"]}, {"precisions": "float32, int8"}),
        (PrecisionBench, {"question": 7}, {"question": "7"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_a_bench_takes_the_types_that_papermill_and_labkit_run_take(
    bench: Any, options: Any, expected: dict[str, object]
) -> None:
    """`papermill -p batches 4` writes a number into the notebook and ignores the annotation."""
    settings = bench(model="tiny-gpt2", **options).settings
    checked = checked_values(parameters_of(bench), options)
    for taken in (settings, checked):
        assert {name: taken[name] for name in expected} == expected
        assert all(type(taken[name]) is type(value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("bench", "options"),
    [
        (StreamingBench, {"memory_gb": "much"}),
        (StreamingBench, {"batches": {"a": 1}}),
        (StreamingBench, {"rounds": True}),
        (ParallelBench, {"tp_sizes": None}),
        (PipelineBench, {"batch": 4.5}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_labkit_run_refuses_a_type_with_the_words_of_the_bench(bench: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UserError) as of_bench:
        bench(model="tiny-gpt2", **options)
    with pytest.raises(UserError) as of_run:
        checked_values(parameters_of(bench), options)
    assert str(of_run.value).splitlines()[0] == str(of_bench.value)


def parameters_of(bench: Any) -> Any:
    cell = new_code_cell(parameters_cell(bench.declared), metadata={"tags": [TAG]})
    return read_parameters(new_notebook(cells=[cell]))
