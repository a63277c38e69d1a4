"""The first notebook, run by `labkit run`: what its page and its executed copy have beside all others."""

import json
from collections.abc import Callable

import nbformat
import pytest
from helpers.notebooks.notebook_cases import CASES
from helpers.notebooks.pages import Page

from labkit.notebooks import RunReport
from labkit.notebooks.report import PLOTLY_MIME_TYPE


@pytest.fixture
def report(report_of: Callable[[str], RunReport]) -> RunReport:
    return report_of("01")


@pytest.mark.sweep
def test_the_executed_notebook_holds_the_figures_and_no_widgets(report: RunReport) -> None:
    notebook = nbformat.read(report.notebook, as_version=4)
    kinds = [kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    assert kinds.count(PLOTLY_MIME_TYPE) == CASES["01"].figures
    assert not any("widget" in kind for kind in kinds)
    assert report.notebook.stat().st_size < 2_000_000


@pytest.mark.sweep
def test_published_figures_are_labelled_in_the_page(report: RunReport) -> None:
    figures = Page(report.html.read_text()).figures
    labelled = [figure for figure in figures if "published, not measured here" in json.dumps(figure)]
    assert len(labelled) == 2
