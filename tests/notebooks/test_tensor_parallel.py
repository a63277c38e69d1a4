"""The fourth notebook, run by `labkit run`: its records and captures."""

from collections.abc import Callable

import pytest
from helpers.notebooks.pages import Page, title_of
from helpers.sweeps import sweep

from labkit.notebooks import RunReport
from labkit.studies.parallel import parse_sizes


@pytest.fixture
def report(report_of: Callable[[str], RunReport]) -> RunReport:
    return report_of("04")


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


def test_numbers_of_ranks_are_sorted_and_one_is_among_them() -> None:
    assert parse_sizes("4, 2") == [1, 2, 4]
