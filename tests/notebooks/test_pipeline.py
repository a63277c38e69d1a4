"""The seventh notebook, run by `labkit run`: its sliders and its spans."""

from collections.abc import Callable

import pytest
from helpers.notebooks.pages import Page
from helpers.sweeps import sweep

from labkit.notebooks import RunReport
from labkit.studies.pipeline import load_study


@pytest.fixture
def report(report_of: Callable[[str], RunReport]) -> RunReport:
    return report_of("07")


@sweep
@pytest.mark.timeout(240)
def test_each_slider_has_several_steps(report: RunReport) -> None:
    figures = Page(report.html.read_text()).figures
    (sliders,) = [figure["layout"]["sliders"] for figure in figures if "sliders" in figure["layout"]]
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
