"""The first notebook, run by `labkit run`."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from pages import MOST_BYTES, Page, run_in

from labkit.notebooks import RunReport, read_parameters
from labkit.notebooks.report import PLOTLY_MIME_TYPE

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "01_vanilla_vs_fused.ipynb"
SMALL = {"model": "tiny-gpt2", "prompt_tokens": 9, "new_tokens": 5, "rounds": 3, "threads": 1}
FIGURES = 5


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return run_in(tmp_path_factory.mktemp("report"), NOTEBOOK, SMALL)


def test_every_parameter_is_typed_and_documented() -> None:
    parameters = read_parameters(nbformat.read(NOTEBOOK, as_version=4))
    assert {parameter.name for parameter in parameters} == {
        "model", "dtype", "batch", "prompt_tokens", "new_tokens", "baseline", "threads", "rounds", "question",
    }  # fmt: skip
    assert all(parameter.types and parameter.help for parameter in parameters)


@pytest.mark.sweep
def test_it_runs_and_says_how_much_faster(report: RunReport) -> None:
    assert report.failure is None
    (headline,) = report.headlines
    assert re.search(r"fused against hf-eager, per token: [\d.]+x \[[\d.]+, [\d.]+\]", headline)


@pytest.mark.sweep
def test_the_page_has_all_figures_and_loads_nothing(report: RunReport) -> None:
    html = report.html.read_text()
    page = Page(html)
    assert page.outside == []
    assert len(page.figures) == FIGURES
    assert len(page.libraries) == 1
    assert len(html) < MOST_BYTES


@pytest.mark.sweep
def test_the_executed_notebook_holds_the_figures_and_no_widgets(report: RunReport) -> None:
    notebook = nbformat.read(report.notebook, as_version=4)
    kinds = [kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    assert kinds.count(PLOTLY_MIME_TYPE) == FIGURES
    assert not any("widget" in kind for kind in kinds)
    assert report.notebook.stat().st_size < 2_000_000


@pytest.mark.sweep
def test_published_figures_are_labelled_in_the_page(report: RunReport) -> None:
    figures = Page(report.html.read_text()).figures
    labelled = [figure for figure in figures if "published, not measured here" in json.dumps(figure)]
    assert len(labelled) == 2
