"""The sixth notebook, run by `labkit run`: its slider and its study."""

from collections.abc import Callable

import pytest
from helpers.notebooks.pages import Page
from helpers.sweeps import sweep

from labkit.notebooks import RunReport
from labkit.studies.larger_than_memory import load_study


@pytest.fixture
def report(report_of: Callable[[str], RunReport]) -> RunReport:
    return report_of("06")


@sweep
@pytest.mark.timeout(240)
def test_each_step_of_the_slider_has_its_data_so_that_it_works_without_a_kernel(report: RunReport) -> None:
    figures = Page(report.html.read_text()).figures
    (slider,) = [figure["layout"]["sliders"][0] for figure in figures if "sliders" in figure["layout"]]
    assert len(slider["steps"]) > 1


@sweep
@pytest.mark.timeout(240)
def test_the_study_is_kept_and_the_weights_are_in_the_requested_folder(report: RunReport) -> None:
    folder = report.html.parents[1]
    (file,) = (folder / "runs").glob("*-small-llama-larger-than-memory.json")
    result = load_study(file)
    assert [point.batch for point in result.points] == [1, 2]
    assert result.points[0].streamed_bytes > 0
    assert result.shown.spans
    assert max(sample.bytes for sample in result.memory) <= result.plan.memory
    assert list((folder / "disk").glob("Llama*"))
