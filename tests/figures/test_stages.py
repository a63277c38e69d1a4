"""Stage bars: the sums are right, and a stage has the same colour in every figure."""

import plotly.graph_objects as go
import pytest
from helpers.studies.comparisons import STAGE_SHARES, STEP_MS, comparison
from helpers.studies.drawn import annotations

from labkit.figures import STAGE_COLORS, region_figure, stage_figure
from labkit.figures.theme import PART_COLORS
from labkit.stages import OUTSIDE, Phase, Stage
from labkit.studies.frames import stage_frame


def whole_steps(figure: go.Figure) -> list[go.Bar]:
    return [trace for trace in figure.data if trace.xaxis in (None, "x")]


def parts(figure: go.Figure) -> dict[str, go.Bar]:
    return {trace.name: trace for trace in figure.data if trace.xaxis == "x2"}


def test_every_stage_has_a_colour_of_its_own() -> None:
    assert set(STAGE_COLORS) == set(Stage)
    assert len(set(PART_COLORS.values())) == len(Stage) + 1


def test_a_decode_step_is_the_mean_over_steps_and_the_sum_over_layers() -> None:
    frame = stage_frame(comparison())
    for stage, share in STAGE_SHARES.items():
        assert frame.loc[stage, "baseline"] == pytest.approx(share * STEP_MS["hf-eager"])
        assert frame.loc[stage, "candidate"] == pytest.approx(share * STEP_MS["fused"])


def test_the_prompts_pass_is_one_call() -> None:
    frame = stage_frame(comparison(), Phase.PREFILL)
    assert frame.loc["qkv", "candidate"] == pytest.approx(STAGE_SHARES[Stage.QKV] * 6 * STEP_MS["fused"])


def test_stages_come_in_the_order_of_a_step() -> None:
    order = [str(stage) for stage in Stage if stage in STAGE_SHARES]
    assert list(stage_frame(comparison()).index) == [*order, OUTSIDE]


@pytest.mark.parametrize(
    ("missing", "rest"),
    [(Stage.QKV, OUTSIDE), pytest.param(Stage.SAMPLE, Stage.SAMPLE, id="a record of an older version")],
)
def test_time_that_no_stage_covers_is_outside(missing: Stage, rest: str) -> None:
    record = comparison()
    whole = stage_frame(record)
    stages = tuple(time for time in record.candidate.stages if time.stage != missing)
    record = record.model_copy(update={"candidate": record.candidate.model_copy(update={"stages": stages})})
    frame = stage_frame(record)
    assert record.candidate.stage_run is not None
    steps = record.candidate.stage_run.decode_ms
    assert frame["candidate"].sum() == pytest.approx(sum(steps) / len(steps))
    assert frame.loc[rest, "candidate"] == pytest.approx(whole.loc[[missing, OUTSIDE], "candidate"].sum())


def test_bars_equal_the_frame_on_both_sides() -> None:
    record = comparison()
    frame, bars = stage_frame(record), parts(stage_figure(record))
    assert bars["hf-eager"].x == tuple(frame["baseline"])
    assert bars["fused"].x == tuple(frame["candidate"])
    assert bars["fused"].y == tuple(frame.index)


def test_the_whole_step_is_stacked_from_the_same_stages_in_the_same_colours() -> None:
    record = comparison()
    frame, figure = stage_frame(record), stage_figure(record)
    assert {trace.name: trace.x for trace in whole_steps(figure)} == {
        name: tuple(row) for name, row in frame.iterrows()
    }
    assert {trace.name: trace.marker.color for trace in whole_steps(figure)} == {
        name: PART_COLORS[name] for name in frame.index
    }
    assert list(parts(figure)["fused"].marker.color) == [PART_COLORS[name] for name in frame.index]


def test_a_side_without_stages_is_left_out_and_named() -> None:
    record = comparison()
    record = record.model_copy(
        update={"baseline": record.baseline.model_copy(update={"stages": (), "stage_run": None})}
    )
    figure = stage_figure(record)
    assert set(parts(figure)) == {"fused"}
    assert any("hf-eager cannot tell" in text for text in annotations(figure))


def test_without_any_stages_the_figures_still_stand() -> None:
    record = comparison(stages=False)
    assert stage_figure(record).data == ()
    measured_bars = region_figure(record).data[0]
    assert set(measured_bars.x) == {None}
