"""The second notebook, run by `labkit run`."""

import re
from pathlib import Path

import nbformat
import pytest
from pages import MOST_BYTES, Page, run_in
from sweeps import sweep

from labkit.notebooks import RunReport, read_parameters

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "02_kernel_by_kernel.ipynb"
SMALL = {"model": "tiny-llama", "context": 9, "rounds": 3, "threads": 2}
FIGURES = 4 + 1 + 1 + 1 + 1  # a drawing per region, the layer, the bars, the ladder, the roof


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return run_in(tmp_path_factory.mktemp("report"), NOTEBOOK, SMALL)


def test_every_parameter_is_typed_and_documented() -> None:
    parameters = read_parameters(nbformat.read(NOTEBOOK, as_version=4))
    names = {"model", "dtype", "batch", "context", "impl", "threads", "rounds"}
    assert {parameter.name for parameter in parameters} == names
    assert all(parameter.types and parameter.help for parameter in parameters)


@sweep
def test_it_runs_and_says_what_fusing_gives(report: RunReport) -> None:
    assert report.failure is None
    (headline,) = report.headlines
    assert re.search(r"a layer fused in the one-call step against unfused torch ops: [\d.]+x \[[\d.]+, ", headline)


@sweep
def test_the_page_has_all_figures_and_loads_nothing(report: RunReport) -> None:
    html = report.html.read_text()
    page = Page(html)
    assert page.outside == []
    assert len(page.figures) == FIGURES
    assert len(html) < MOST_BYTES
    assert "gives the result of the unfused ops" in html
