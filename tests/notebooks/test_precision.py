"""The fifth notebook, run by `labkit run`, and its live controls."""

import re
from pathlib import Path

import nbformat
import pytest
from pages import MOST_BYTES, Page, run_in
from sweeps import sweep

from labkit.notebooks import RunReport, read_parameters
from labkit.studies.precision import PRECISIONS, load_study
from labkit.widgets import PrecisionBench
from labkit.widgets.controls import Controls

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "05_precision.ipynb"
SETTINGS = {
    "model": "tiny-gpt2", "precisions": "float32, int4-64+head8, int4-128", "question": "Where?", "tokens": 64,
    "new_tokens": 3, "rounds": 2, "threads": 1,
}  # fmt: skip
FIGURES = 4  # the front, the cost of a token, the errors by matrix, the outliers


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return run_in(tmp_path_factory.mktemp("report"), NOTEBOOK, SETTINGS)


def test_every_parameter_is_typed_and_documented() -> None:
    parameters = {parameter.name: parameter for parameter in read_parameters(nbformat.read(NOTEBOOK, as_version=4))}
    assert parameters.keys() == SETTINGS.keys()
    assert all(parameter.types and parameter.help for parameter in parameters.values())
    assert parameters["precisions"].default == PRECISIONS


@pytest.mark.timeout(240)
@sweep
def test_it_says_what_the_fastest_gains_and_what_that_costs(report: RunReport) -> None:
    assert report.failure is None, report.failure
    (headline,) = report.headlines
    assert re.match(r"tiny-gpt2: int4-64\+head8 against float32, per token: [\d.]+x \[.*; KL \d", headline)
    assert "perplexity" not in headline


@pytest.mark.timeout(240)
@sweep
def test_the_page_has_all_figures_loads_nothing_and_says_what_cannot_be(report: RunReport) -> None:
    html = report.html.read_text()
    page = Page(html)
    assert page.outside == []
    assert len(page.figures) == FIGURES
    assert len(html) < MOST_BYTES
    assert "cannot be: group_size=128 does not divide the 64 inputs" in page.text
    assert "perplexity means nothing" in page.text
    assert "no chat template" in page.text
    assert page.text.count("not answered yet") == 1


@pytest.mark.timeout(240)
@sweep
def test_the_study_is_kept(report: RunReport) -> None:
    (file,) = (report.html.parents[1] / "runs").glob("*-tiny-gpt2-precisions.json")
    result = load_study(file)
    assert [side.precision for side in result.sides] == ["float32", "int4-64+head8"]
    assert result.first.evaluation.kl.value == 0
    assert result.sides[1].evaluation.weights == "int4-row, LM head int8-32"  # a group of 64 inputs is a row here


def test_every_setting_has_a_control_with_help() -> None:
    controls = Controls(SETTINGS, {}, lambda settings, follow: None)
    assert controls.settings == SETTINGS
    assert all(control.tooltip for control in controls._inputs.values())


@pytest.mark.parametrize("text", ["int8", "float32, int5"])
def test_no_precisions_are_refused_before_anything_runs(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        PrecisionBench(model="tiny-gpt2", precisions=text)
