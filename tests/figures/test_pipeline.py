"""The figures of pipelines show measured times next to the ideal and the formula, each with its own name."""

import plotly.graph_objects as go
import pytest
from helpers.studies.drawn import subtitle, texts, title
from helpers.studies.pipeline_studies import RUNS, STAGES, run, study

from labkit.figures import (
    bubble_figure,
    ideal_figure,
    micro_batch_figure,
    pipeline_gains_figure,
    pipeline_timeline_figure,
    prompt_timeline_figure,
    study_notes,
    ways_figure,
)
from labkit.figures.pipeline import FORMULA, MEASURED_HERE, UNEQUAL
from labkit.figures.pipeline_ideal import DRAWN, MOST_PARTS
from labkit.figures.pipeline_timeline import IDEAL_NAME, NAMES
from labkit.published import NOT_MEASURED_HERE, published


def traces(figure: go.Figure, name: str) -> list[go.Bar]:
    return [trace for trace in figure.data if trace.name == name]


def test_every_step_is_a_bar_next_to_its_ideal() -> None:
    record = study()
    figure = pipeline_timeline_figure(record)
    assert len(figure.data) == (len(NAMES) + 1) * len(record.shown)  # one trace for all bars of a kind
    for measured, drawn, ideal in zip(
        record.shown, traces(figure, NAMES["compute"]), traces(figure, IDEAL_NAME), strict=True
    ):
        steps = measured.tokens * measured.micro_batches * STAGES
        assert len(drawn.x) == len(ideal.x) == steps
        assert list(drawn.base) == pytest.approx(list(ideal.base), abs=1e-3)
        assert len(set(drawn.marker.color)) == measured.micro_batches


def test_the_prompt_is_hatched_and_its_end_is_marked() -> None:
    figure = prompt_timeline_figure(study())
    for drawn in traces(figure, NAMES["compute"]):
        assert list(drawn.marker.pattern.shape) == ["/"] * STAGES
    assert {shape.x0 for shape in figure.layout.shapes} == {40.0}


def test_bubbles_are_next_to_their_formulas() -> None:
    uneven = run("queue", 2, stage_ms=(4.0, 6.0))
    figure = bubble_figure(study(runs=(uneven, run("naive", 1))))
    drawn = {trace.name: list(trace.x) for trace in figure.data}
    assert drawn[MEASURED_HERE] == [uneven.bubble, 0.5]
    assert drawn[FORMULA] == [uneven.formula, 0.5]
    assert drawn[UNEQUAL] == pytest.approx([uneven.bubble, 0.5])
    assert f"{(uneven.bubble - uneven.formula) * 100:+.1f} points" in texts(figure)
    assert f"by {(uneven.bubble - uneven.formula) * 100:.1f} points" in title(figure)


def test_an_axis_of_shares_ends_with_the_whole() -> None:
    axis = bubble_figure(study(runs=(run("naive", 1, stage_ms=(5.0,) * 4),))).layout.xaxis
    assert axis.range[1] > 1
    assert axis.tickvals[-1] == pytest.approx(1)
    assert axis.ticktext[-1] == "100%"


def test_points_lie_on_the_formulas_lines_and_the_turn_is_marked() -> None:
    figure = micro_batch_figure(study())
    assert isinstance(figure, go.Figure)
    lines = {trace.name: dict(zip(trace.x, trace.y, strict=True)) for trace in figure.data}
    for schedule, parts in RUNS[:-1]:
        assert lines[schedule][parts] == pytest.approx(lines[f"{schedule}, by formula"][parts])
    assert [shape.x0 for shape in figure.layout.shapes] == [pytest.approx(8 / 3)]
    assert "Only the schedule naive" in str(micro_batch_figure(study(runs=(run("naive", 1),))))


def test_where_no_step_was_small_enough_nothing_is_marked() -> None:
    figure = micro_batch_figure(study(runs=(run("queue", 2), run("naive", 1))))
    assert isinstance(figure, go.Figure)
    assert not figure.layout.shapes
    assert "No step was so small" in subtitle(figure)


def test_tensor_parallelism_is_next_to_the_pipeline() -> None:
    figure = ways_figure(study())
    assert isinstance(figure, go.Figure)
    assert [list(trace.x) for trace in figure.data] == [[2, 8]] * 3
    assert "batch 8: 0.83x" in subtitle(figure)
    assert "tensor parallelism wins" in study_notes(study())
    assert isinstance(ways_figure(study(ways=())), str)
    assert "Not measured: tensor parallelism: no" in study_notes(study(ways=(), left_out="tensor parallelism: no"))


def test_published_gains_are_told_apart() -> None:
    measured_bars, published_bars = pipeline_gains_figure(study()).data
    assert (measured_bars.name, published_bars.name) == (MEASURED_HERE, NOT_MEASURED_HERE)
    assert list(published_bars.x) == list(published("sc22-pipeline-530b")["value"]) == [1.0, 2.01, 2.26, 3.23, 4.33]
    assert measured_bars.xaxis != published_bars.xaxis


def test_each_slider_changes_all_that_the_other_may_show() -> None:
    figure = ideal_figure(study())
    stages, parts = figure.layout.sliders
    assert len(parts.steps) == MOST_PARTS
    for step in parts.steps:
        assert {len(values) for values in step.args[0].values()} == {len(figure.data)}
    for index, step in enumerate(stages.steps):
        visible = step.args[0]["visible"]
        assert len(visible) == len(figure.data)
        assert sum(visible) == 2 * len(DRAWN)
        assert visible.index(True) == 2 * len(DRAWN) * index
    active = parts.steps[parts.active].args[0]
    for index, trace in enumerate(figure.data):
        assert trace.type == "scatter" or list(active["base"][index]) == list(trace.base)
    assert len(figure.to_json()) < 1_000_000
