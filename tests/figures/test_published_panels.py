"""Published figures are next to ours and can be told apart from them."""

from collections.abc import Callable
from dataclasses import replace

import plotly.graph_objects as go
import pytest
from helpers.studies.comparisons import comparison
from helpers.studies.drawn import annotations, subtitle

from labkit.figures import published_figure, region_figure, stage_figure
from labkit.harness import Comparison
from labkit.published import NOT_MEASURED_HERE, published, published_speedups
from labkit.stages import Stage

Draw = Callable[[Comparison], go.Figure]
DRAWN: list[Draw] = [published_figure, region_figure]


@pytest.mark.parametrize("draw", DRAWN)
def test_published_bars_are_named_so_and_have_axes_of_their_own(draw: Draw) -> None:
    measured_bars, published_bars = draw(comparison()).data
    assert published_bars.name == NOT_MEASURED_HERE
    assert NOT_MEASURED_HERE in published_bars.hovertemplate
    assert measured_bars.name != published_bars.name
    assert (measured_bars.xaxis, measured_bars.yaxis) != (published_bars.xaxis, published_bars.yaxis)


@pytest.mark.parametrize("draw", DRAWN)
def test_published_bars_look_different(draw: Draw) -> None:
    measured_bars, published_bars = draw(comparison()).data
    assert published_bars.marker.pattern.shape
    assert not measured_bars.marker.pattern.shape


@pytest.mark.parametrize("draw", DRAWN)
def test_the_panel_says_that_it_was_not_measured_here_and_who_published_it(draw: Draw) -> None:
    figure = draw(comparison())
    assert sum(NOT_MEASURED_HERE in text for text in annotations(figure)) == 1
    for source in set(figure.data[1].customdata):
        assert f"{NOT_MEASURED_HERE}: {source}" in subtitle(figure)


def test_published_labels_name_model_and_hardware() -> None:
    labels = published_figure(comparison()).data[1].y
    assert all(any(word in label for word in ("not stated", "A100", "A6000")) for label in labels)
    assert all("batch" in label for label in labels)


def test_our_bars_are_the_records_ratios_with_their_intervals() -> None:
    record = comparison()
    measured_bars = published_figure(record).data[0]
    for index, metric in enumerate(("ttft", "per_token", "end_to_end")):
        ratio = record.ratio(metric)
        assert measured_bars.x[index] == ratio.value
        assert measured_bars.x[index] + measured_bars.error_x.array[index] == pytest.approx(ratio.high)
        assert measured_bars.x[index] - measured_bars.error_x.arrayminus[index] == pytest.approx(ratio.low)


def test_the_batch_decides_which_published_row_is_shown() -> None:
    batch_1, batch_8 = published_speedups(1), published_speedups(8)
    bloom = batch_1["model"] == "bloom-7b1"
    assert batch_1.loc[bloom, "batch"].item() == 1
    assert batch_8.loc[bloom, "batch"].item() == 8


def test_regions_stand_in_the_same_order_on_both_sides() -> None:
    measured_bars, published_bars = region_figure(comparison()).data
    assert measured_bars.y == published_bars.y
    assert list(published_bars.x) == list(published("deep-fusion")["value"])


@pytest.mark.parametrize(("ms", "logarithmic"), [(1.2, False), (0.05, True)])
def test_ratios_that_differ_by_orders_are_on_a_logarithmic_axis(ms: float, logarithmic: bool) -> None:
    record = comparison()
    stages = tuple(
        replace(time, total_ms=time.total_ms * ms) if time.stage == Stage.ATTENTION else time
        for time in record.candidate.stages
    )
    faster = record.model_copy(update={"candidate": record.candidate.model_copy(update={"stages": stages})})
    axis = region_figure(faster).layout.xaxis
    assert (axis.type == "log") == logarithmic
    assert axis.title.text == ("(log)" if logarithmic else None)
    largest = 3 / ms if logarithmic else 3
    assert (10 ** axis.range[1] if logarithmic else axis.range[1]) > largest


def test_our_region_bars_are_ratios_of_stage_times() -> None:
    assert region_figure(comparison()).data[0].x == pytest.approx((3.0, 3.0, 3.0, 3.0))


def test_regions_say_what_their_times_are_from_as_stages_do() -> None:
    record = comparison()
    assert subtitle(region_figure(record)).startswith(subtitle(stage_figure(record)))
    assert "without an interval" in subtitle(region_figure(record))
