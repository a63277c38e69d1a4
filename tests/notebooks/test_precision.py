"""The fifth notebook, run by `labkit run`: its study."""

from collections.abc import Callable

import pytest
from helpers.sweeps import sweep

from labkit.notebooks import RunReport
from labkit.studies.precision_study import load_study


@pytest.fixture
def report(report_of: Callable[[str], RunReport]) -> RunReport:
    return report_of("05")


@pytest.mark.timeout(240)
@sweep
def test_the_study_is_kept(report: RunReport) -> None:
    (file,) = (report.html.parents[1] / "runs").glob("*-tiny-gpt2-precisions.json")
    result = load_study(file)
    assert [side.precision for side in result.sides] == ["float32", "int4-64+head8"]
    assert result.first.evaluation.kl.value == 0
    assert result.sides[1].evaluation.weights == "int4-row, LM head int8-32"  # a group of 64 inputs is a row here
