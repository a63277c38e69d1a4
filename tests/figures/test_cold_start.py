"""The bars of a cold start are the times of the record."""

import plotly.graph_objects as go
import pytest
from helpers.studies.comparisons import comparison

from labkit.figures import cold_start_figure
from labkit.figures.cold_start import PHASES
from labkit.harness import Comparison


def started(**seconds: float | None) -> Comparison:
    """A comparison whose sides took this long to start."""
    record = comparison()
    sides = {role: getattr(record, role).model_copy(update=seconds) for role in ("baseline", "candidate")}
    return record.model_copy(update=sides)


def test_bars_are_the_phases_and_add_up_to_the_whole() -> None:
    record = started(start_to_ready_s=6.0, load_s=1.5, first_run_s=0.5)
    figure = cold_start_figure(record)
    assert isinstance(figure, go.Figure)
    assert [bar.name for bar in figure.data] == list(PHASES)
    start, load, prompt, tokens = (bar.x for bar in figure.data)
    assert start == pytest.approx((4.0, 4.0))
    assert load == (1.5, 1.5)
    for place, side in enumerate((record.baseline, record.candidate)):
        assert prompt[place] == pytest.approx(side.summary("ttft").median / 1e3)
        assert tokens[place] == pytest.approx(side.per_token_ms * (side.case.new_tokens - 1) / 1e3)


def test_a_record_without_times_of_starting_says_so() -> None:
    assert cold_start_figure(started(start_to_ready_s=None)) == "This record has no times of starting and loading."
