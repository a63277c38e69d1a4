"""The seventh notebook, run by `labkit run`, and its live controls."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from pages import MOST_BYTES, Page, run_in
from sweeps import sweep

from labkit.notebooks import RunReport, read_parameters
from labkit.studies.pipeline import load_study
from labkit.system.errors import UserError
from labkit.widgets import PipelineBench
from labkit.widgets.controls import Controls

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "07_pipeline.ipynb"
SETTINGS: dict[str, Any] = {
    "model": "tiny-llama", "dtype": "float32", "stages": 2, "batch": 4, "prompt_tokens": 6, "new_tokens": 5,
    "schedules": "queue, barrier, naive", "micro_batches": "2, 4", "rounds": 2, "threads": 1,
}  # fmt: skip
FIGURES = 8  # timeline, prompt, bubbles, sliders, micro-batches, ways to split, the paper, the puzzle


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return run_in(tmp_path_factory.mktemp("report"), NOTEBOOK, SETTINGS)


def test_every_parameter_is_typed_and_documented() -> None:
    parameters = {parameter.name: parameter for parameter in read_parameters(nbformat.read(NOTEBOOK, as_version=4))}
    assert parameters.keys() == SETTINGS.keys()
    assert all(parameter.types and parameter.help for parameter in parameters.values())


@sweep
@pytest.mark.timeout(240)
def test_it_says_what_the_schedules_gain(report: RunReport) -> None:
    assert report.failure is None, report.failure
    (headline,) = report.headlines
    assert headline.startswith("tiny-llama, float32, 2 stages, batch 4, 6 + 5 tokens: ")
    assert re.search(r"(x \[.*\] naive's|naive makes the most) tokens", headline)
    assert "2 rounds, fewer than 6" in headline


@sweep
@pytest.mark.timeout(240)
def test_the_page_has_all_figures_and_loads_nothing(report: RunReport) -> None:
    html = report.html.read_text()
    page = Page(html)
    assert page.outside == []
    assert len(page.figures) == FIGURES
    assert len(html) < MOST_BYTES
    assert page.text.count("not answered yet") == 2
    (sliders,) = [figure["layout"]["sliders"] for figure in page.figures if "sliders" in figure["layout"]]
    assert all(len(slider["steps"]) > 1 for slider in sliders)


@sweep
@pytest.mark.timeout(240)
def test_the_spans_of_all_stages_are_kept_on_one_clock(report: RunReport) -> None:
    (file,) = (report.html.parents[1] / "runs").glob("*-tiny-llama-pp2.jsonl")
    measured = load_study(file).measured
    assert [run.name for run in measured.runs] == [
        "queue, m = 2",
        "queue, m = 4",
        "barrier, m = 2",
        "barrier, m = 4",
        "naive",
    ]
    for run in measured.runs:
        steps = [span for span in run.spans if span.kind == "compute" and span.step > 0]
        for stage in range(2):
            assert sum(span.stage == stage for span in steps) == run.micro_batches * run.tokens
        ends = {(span.micro_batch, span.step): span.end_ms for span in steps if span.stage == 0}
        for span in steps:
            assert span.stage == 0 or span.begin_ms >= ends[span.micro_batch, span.step]
        assert 0 <= run.bubble < 1
        assert min(span.begin_ms for span in run.spans) >= 0
        assert run.end_ms <= run.wall_ms
    assert {(point.way, point.batch) for point in measured.ways} == {
        (way, batch) for way in ("queue", "naive", "tensor parallel") for batch in (2, 4)
    }


def test_every_setting_has_a_control_with_help() -> None:
    controls = Controls(SETTINGS, {}, lambda settings, follow: None)
    assert controls.settings == SETTINGS
    assert all(control.tooltip for control in controls._inputs.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedules": "queue, best"}, "expected some of queue, rounds, barrier, naive"),
        ({"schedules": " , "}, "expected some of queue"),
        ({"micro_batches": "two"}, "expected numbers of micro-batches"),
        ({"stages": 1}, "got stages = 1, expected 2 to"),
        ({"batch": 4.0}, "got batch = 4.0, expected int"),
    ],
)
def test_wrong_settings_are_refused_before_anything_runs(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PipelineBench(**({"model": "tiny-gpt2"} | settings))
