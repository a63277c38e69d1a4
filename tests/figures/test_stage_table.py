"""The figure of a stage table shows the figures of the table, stage by stage or layer by layer."""

import pytest
from helpers.studies.drawn import annotations, subtitle, title
from helpers.traces.handmade import VANILLA, Recorder, decode, disorder, layers

from labkit.figures.stage_table import REST_COLORS, stage_table_figure
from labkit.figures.theme import META, MODEBAR, STAGE_COLORS
from labkit.nsys.analysis.stage_table import stage_table
from labkit.nsys.trace import Trace
from labkit.stages import Phase, Stage
from labkit.studies.frames import number


def two_phases() -> Trace:
    recorder = Recorder()
    for phase, start, length in (("prefill", 0, 80), ("decode", 80, 10), ("decode", 90, 12)):
        recorder.range(f"{phase}/embed", start, start + length - 2)
        recorder.range(f"{phase}/step", start, start + length)
    return recorder.trace()


@pytest.mark.parametrize("gpu", [True, False])
def test_a_bar_for_every_stage_in_its_colour(gpu: bool) -> None:
    table = stage_table(decode(layers(VANILLA, 2), noise=0.1, gpu=gpu, between_us=1), ("phase", "stage"))
    bar = stage_table_figure(table).data[0]
    assert list(bar.y) == table.frame["stage"].tolist()
    assert list(bar.x) == table.frame["step_ms"].tolist()
    colors = REST_COLORS | {str(stage): color for stage, color in STAGE_COLORS.items()}
    assert list(bar.marker.color) == [colors[stage] for stage in table.frame["stage"]]


def test_the_figures_next_to_the_bars_are_those_of_the_table() -> None:
    table = stage_table(decode(layers(VANILLA, 2), noise=0.1), ("phase", "stage"))
    texts = annotations(stage_table_figure(table))
    for heading in ("ms", "share", "runs", "median µs", "P95 µs", "ops", "gaps µs"):
        assert f"<b>{heading.replace(' ', '<br>')}</b>" in texts
    assert "<b>exposed<br>ms</b>" not in texts
    for row in table.frame.itertuples():
        assert {f"{row.share:.1%}", number(row.step_ms), number(row.median_ms * 1e3)} <= set(texts)


def test_p95_of_few_runs_is_in_parentheses_and_explained() -> None:
    few, many = (stage_table_figure(stage_table(decode(VANILLA, steps=count), ("stage",))) for count in (8, 60))
    assert any(text.startswith("(") for text in annotations(few))
    assert "fewer than 59" in subtitle(few)
    assert not any(text.startswith("(") for text in annotations(many))
    assert "fewer than 59" not in subtitle(many)


def test_a_cpu_has_no_column_of_the_gpu() -> None:
    texts = annotations(stage_table_figure(stage_table(decode(VANILLA, gpu=False), ("stage",))))
    assert not {"<b>ops</b>", "<b>gaps<br>µs</b>"} & set(texts)


def test_a_table_by_layer_is_a_map() -> None:
    table = stage_table(decode(layers(VANILLA, 3), noise=0.1))
    picture = stage_table_figure(table).data[0]
    assert list(picture.y) == ["layer 0", "layer 1", "layer 2", "no layer"]
    us = {(y, x): z for y, row in zip(picture.y, picture.z, strict=True) for x, z in zip(picture.x, row, strict=True)}
    cell = table.frame.query("layer == 1 and stage == 'mlp'").iloc[0]
    assert us["layer 1", "mlp"] == pytest.approx(cell["step_ms"] * 1e3)
    known = [value for value in us.values() if value == value]
    assert sum(known) == pytest.approx(table.frame["step_ms"].sum() * 1e3)
    assert len(known) == len(table.frame)


@pytest.mark.parametrize("seed", range(4))
def test_any_table_can_be_drawn(seed: int) -> None:
    for by in (("stage",), ("phase", "stage"), ("layer", "stage"), ("phase", "layer", "stage")):
        assert stage_table_figure(stage_table(disorder(seed, gpu=seed % 2 == 0), by)).layout.height > 200


def test_one_phase_is_shown_and_decode_unless_another_is_asked_for() -> None:
    table = stage_table(two_phases(), ("phase", "stage"))
    assert "a decode step" in title(stage_table_figure(table))
    prefill = stage_table_figure(table, Phase.PREFILL)
    assert "a prefill step" in title(prefill)
    assert sum(prefill.data[0].x) == pytest.approx(0.080)
    assert "mean of 1 step on" in subtitle(prefill)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="all ranks"):
        stage_table_figure(stage_table(disorder(1, ranks=2), ("rank", "stage")))
    with pytest.raises(ValueError, match="the table has: decode"):
        stage_table_figure(stage_table(decode(VANILLA), ("phase", "stage")), Phase.PREFILL)


def test_every_stage_and_the_rest_has_a_colour() -> None:
    assert not set(REST_COLORS) & {str(stage) for stage in Stage}


def test_headings_are_below_the_buttons_of_a_page_that_takes_the_title_away() -> None:
    figure = stage_table_figure(stage_table(decode(VANILLA, gpu=False), ("stage",)))
    assert figure.layout.margin.t - figure.layout.meta[META]["above"] >= MODEBAR
