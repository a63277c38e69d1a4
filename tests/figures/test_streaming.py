"""The figures of streaming show measured times next to predicted ones, each with its own name."""

import plotly.graph_objects as go
import pytest
from helpers.studies.drawn import annotations, subtitle, texts, title
from helpers.studies.streaming_plans import LAYERS, point, spans
from helpers.studies.streaming_studies import BATCHES, study

from labkit.figures import (
    batch_figure,
    memory_figure,
    offload_figure,
    residency_figure,
    stream_timeline_figure,
    study_notes,
)
from labkit.figures.stream_timeline import IN_MEMORY, NAMES, WAIT_LANE
from labkit.figures.streaming import BUDGET, COMPUTE_LINE, DISK_LINE, HELD, MEASURED
from labkit.figures.theme import LOG
from labkit.published import NOT_MEASURED_HERE, published


def traces(figure: go.Figure) -> dict[str, go.Scatter]:
    return {trace.name: trace for trace in figure.data}


def test_measured_points_are_next_to_predicted_lines() -> None:
    record = study()
    drawn = traces(batch_figure(record))
    assert tuple(drawn[MEASURED].x) == BATCHES
    assert tuple(drawn[MEASURED].y) == tuple(entry.tokens_per_s for entry in record.points)
    for name in (DISK_LINE, COMPUTE_LINE):
        assert "predicted" in name
        assert drawn[name].line.dash == "dash"
    for batch, by_disk, by_computing in zip(drawn[DISK_LINE].x, drawn[DISK_LINE].y, drawn[COMPUTE_LINE].y, strict=True):
        assert min(by_disk, by_computing) == pytest.approx(record.plan.step(batch).tokens_per_s)


def test_the_batch_from_which_streaming_is_free_and_the_largest_are_marked() -> None:
    record = study()
    figure = batch_figure(record)
    assert {shape.x0 for shape in figure.layout.shapes} == {record.plan.largest_batch, record.plan.free_batch}
    assert f"largest that fits: {record.plan.largest_batch:,}" in texts(figure)
    assert f"r*: free from {record.plan.free_batch:,} on" in texts(figure)


def test_a_disk_that_was_not_steady_is_said() -> None:
    record = study()
    unsteady = record.plan.model_copy(update={"points": (point(1, 500.0),)})
    assert "not trustworthy" in subtitle(batch_figure(study(plan=unsteady)))
    assert "the disk was not steady" in study(plan=unsteady).outcome.grade
    assert "not trustworthy" not in subtitle(batch_figure(record))


def test_every_span_is_a_bar_in_its_lane_and_panel() -> None:
    record = study(plan=study().plan.model_copy(update={"points": (point(1, spans=spans(layers=6, steps=4)),)}))
    figure = stream_timeline_figure(record)
    assert isinstance(figure, go.Figure)
    whole = {
        kind: sum(span.end_ms - span.begin_ms for span in record.shown.spans if span.kind == kind) for kind in NAMES
    }
    prompt, steps = figure.data[: len(NAMES)], figure.data[len(NAMES) :]
    computed = {trace.name: sum(trace.x) for trace in steps}[NAMES["compute"]]
    assert computed == pytest.approx(whole["compute"] * 2 / 4)  # two steps of four passes
    assert sum({trace.name: trace for trace in prompt}[NAMES["compute"]].x) == pytest.approx(whole["compute"] / 4)
    assert {lane for trace in figure.data for lane in trace.y} == {WAIT_LANE, "slot 0", "slot 1"}
    for trace in figure.data:
        assert all(base >= 0 for base in trace.base)
        assert all(width >= 0 for width in trace.x)


def test_layers_in_memory_have_a_lane_of_their_own() -> None:
    with_resident = (*spans(), spans()[0].model_copy(update={"slot": None, "kind": "compute", "layer": 9}))
    record = study(plan=study().plan.model_copy(update={"points": (point(1, spans=with_resident),)}))
    figure = stream_timeline_figure(record)
    assert isinstance(figure, go.Figure)
    assert IN_MEMORY in figure.layout.yaxis.categoryarray


def test_where_nothing_was_read_there_is_no_timeline() -> None:
    whole = point(1, resident=LAYERS, streamed_bytes=0, spans=())
    assert "nothing was read" in str(
        stream_timeline_figure(study(plan=study().plan.model_copy(update={"points": (whole,)})))
    )


def test_memory_is_drawn_against_the_budget() -> None:
    record = study()
    drawn = traces(memory_figure(record))
    assert set(drawn[BUDGET].y) == {record.plan.memory / 1e6}
    assert max(drawn[HELD].y) == max(sample.bytes for sample in record.memory) / 1e6
    assert "1,200 MB at most" in title(memory_figure(record))
    assert {f"batch {batch}" for batch in BATCHES} <= set(annotations(memory_figure(record)))


def test_each_stop_of_the_slider_replaces_all_traces_with_what_it_predicts() -> None:
    record = study()
    figure = residency_figure(record)
    (slider,) = figure.layout.sliders
    assert [step.value for step in slider.steps] == [str(entry.resident_layers) for entry in record.plan.trade]
    for stop, planned in zip(slider.steps, record.plan.trade, strict=True):
        (new,) = stop.args
        assert {len(values) for values in new.values()} == {len(figure.data)}
        assert (new["x"][1], new["y"][1]) == ([planned.batch], [planned.tokens_per_s])
        assert sum(values[0] for values in new["x"][2:]) == pytest.approx(planned.memory_bytes / 1e6)
        assert f"{planned.batch:,} fit" in stop.label
    active = slider.steps[slider.active]
    assert active.args[0]["x"] == [list(trace.x) for trace in figure.data]
    assert active.value == str(record.plan.highest_throughput.resident_layers)
    assert "nothing here is measured" in subtitle(figure)
    assert figure.layout.yaxis.type == "log"
    assert any(text.endswith(LOG) for text in annotations(figure))


def test_ratios_have_intervals_and_published_figures_a_panel_of_their_own() -> None:
    record = study()
    measured_bars, published_bars = offload_figure(record).data
    ratio = record.comparisons[0].ratio("per_token")
    assert list(measured_bars.x) == [ratio.value]
    assert list(measured_bars.error_x.array) == [ratio.high - ratio.value]
    assert published_bars.name == NOT_MEASURED_HERE
    assert set(published_bars.x) <= {
        *published("zero-inference-v100")["value"],
        *published("zero-inference-a6000")["value"],
    }
    assert "A6000" in " ".join(published_bars.y)
    assert "ZeRO-Inference: Democratizing" in subtitle(offload_figure(record))


def test_without_baselines_the_published_figures_still_stand_apart() -> None:
    figure = offload_figure(study(compared=False))
    (published_bars,) = figure.data
    assert published_bars.name == NOT_MEASURED_HERE
    assert "no baseline was measured" in subtitle(figure)


def test_the_notes_say_what_is_free_what_did_not_fit_and_who_is_missing() -> None:
    notes = study_notes(study())
    assert "Computing takes as long as the disk from" in notes
    assert "does not fit: batch 5,000" in notes
    assert "`hf-disk`: not installed" in notes
    assert "Before you trust" not in notes
