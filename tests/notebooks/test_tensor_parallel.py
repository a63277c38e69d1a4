"""The fourth notebook, run by `labkit run`, and its live controls."""

import re
from pathlib import Path

import nbformat
import pytest
from pages import MOST_BYTES, Page, run_in, title_of
from sweeps import sweep

from labkit.notebooks import RunReport, read_parameters
from labkit.studies.parallel import parse_sizes
from labkit.widgets import ParallelBench
from labkit.widgets.controls import Controls

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "04_tensor_parallel.ipynb"
SMALL = {"model": "tiny-gptj", "prompt_tokens": 9, "new_tokens": 5, "rounds": 2, "threads": 1}
FIGURES = 2 + 1 + 1 + 1  # two of the shards, the scaling, the step of every rank, the articles
SETTINGS = {
    "model": "tiny-llama", "tp_sizes": "1,2", "dtype": "float32", "prompt_tokens": 9, "new_tokens": 5, "rounds": 2,
    "threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return run_in(tmp_path_factory.mktemp("report"), NOTEBOOK, SMALL)


def test_every_parameter_is_typed_and_documented() -> None:
    parameters = read_parameters(nbformat.read(NOTEBOOK, as_version=4))
    assert {parameter.name for parameter in parameters} == SETTINGS.keys()
    assert all(parameter.types and parameter.help for parameter in parameters)


@pytest.mark.timeout(240)
@sweep
def test_it_says_what_two_ranks_gain_and_what_the_memory_allows(report: RunReport) -> None:
    assert report.failure is None, report.failure
    (headline,) = report.headlines
    assert re.match(r"tiny-gptj, float32: 2 ranks of 1 thread against one, per token: [\d.]+x \[", headline)
    assert "wait for each other" in headline


@pytest.mark.timeout(240)
@sweep
def test_the_page_has_all_figures_and_loads_nothing(report: RunReport) -> None:
    html = report.html.read_text()
    page = Page(html)
    assert page.outside == []
    assert len(page.figures) == FIGURES
    assert len(html) < MOST_BYTES
    assert "published, not measured here" in html


@pytest.mark.timeout(240)
@sweep
def test_a_record_and_a_capture_of_each_rank_are_kept(report: RunReport) -> None:
    kept = {file.name.partition(".")[0] for file in (report.html.parents[1] / "runs").iterdir()}
    assert {"tiny-gptj-fused-tp2", "tiny-gptj-fused-tp2-r0", "tiny-gptj-fused-tp2-r1"} <= kept
    assert any(name.endswith("fused-vs-fused-tp2") for name in kept)


@pytest.mark.timeout(240)
@sweep
def test_the_capture_has_the_sums_that_the_exercise_asks_for(report: RunReport) -> None:
    (waiting,) = [drawn for drawn in Page(report.html.read_text()).figures if "every rank" in title_of(drawn)]
    assert waiting["layout"]["meta"]["labkit"]["subtitle"].startswith("2 sums in the step")  # one for each layer


def test_every_setting_has_a_control_with_help() -> None:
    controls = Controls(SETTINGS, {"dtype": ["float32"], "tp_sizes": ["1,2,4"]}, lambda settings, follow: None)
    assert controls.settings == SETTINGS
    assert all(control.tooltip for control in controls._inputs.values())


def test_numbers_of_ranks_are_sorted_and_one_is_among_them() -> None:
    assert parse_sizes("4, 2") == [1, 2, 4]


@pytest.mark.parametrize("text", ["", "1", "two", "0,2", "1;2"])
def test_no_numbers_of_ranks_are_refused_before_anything_runs(text: str) -> None:
    with pytest.raises(ValueError, match=f"got tp_sizes = '{text}', expected numbers of ranks"):
        ParallelBench(model="tiny-llama", tp_sizes=text)
