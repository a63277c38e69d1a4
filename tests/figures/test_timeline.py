"""The static timeline shows every event in its window in a bounded number of bars, and says how many it merged."""

import re

import numpy as np
import plotly.graph_objects as go
import pytest
from helpers.notebooks.pages import MOST_BYTES
from helpers.studies.drawn import annotations, subtitle
from helpers.traces.handmade import Recorder

from labkit.figures.page import figure_page
from labkit.figures.theme import STAGE_COLORS
from labkit.figures.timeline import MOST_BARS, SHADE_COLORS, timeline
from labkit.nsys.timeline.lanes import build_lanes
from labkit.nsys.timeline.shades import SHADES
from labkit.nsys.timeline.synthetic import decode_trace, trace_of
from labkit.nsys.trace import Source, Trace, TraceError

PAIR = {"vanilla": decode_trace(steps=6, layers=3, kernels_per_stage=3), "fused": decode_trace(steps=6, layers=3)}


def bars(figure: go.Figure) -> list[go.Bar]:
    return [trace for trace in figure.data if trace.type == "bar"]


def test_one_bar_trace_for_each_thread_and_stream() -> None:
    figure = timeline(PAIR)
    assert len(bars(figure)) == len(build_lanes(PAIR).strips)
    assert [trace.name for trace in bars(figure)] == [strip.label for strip in build_lanes(PAIR).strips]


def test_few_events_are_all_there_one_by_one() -> None:
    figure, lanes = timeline(PAIR), build_lanes(PAIR)
    assert sum(len(trace.x) for trace in bars(figure)) == len(lanes)
    assert subtitle(figure).startswith(f"all {len(lanes):,} events in ")
    begins = np.concatenate([trace.base for trace in bars(figure)])
    assert np.sort(begins) == pytest.approx(np.sort(lanes.start) / 1e6, abs=1e-5)


def test_many_events_are_merged_and_counted() -> None:
    trace = trace_of(60_000)
    figure, lanes = timeline(trace), build_lanes(trace)
    drawn = sum(len(bar.x) for bar in bars(figure))
    assert drawn <= MOST_BARS
    match = re.fullmatch(
        r"all ([\d,]+) events in [\d,.]+ ms; ([\d,]+) one by one, "
        r"the others, shorter than [\d.]+ (?:µs|ms), in ([\d,]+) merged bars",
        subtitle(figure),
    )
    assert match
    total, alone, merged = (int(number.replace(",", "")) for number in match.groups())
    assert (total, alone + merged) == (len(lanes), drawn)
    hovers = [text for bar in bars(figure) for text in bar.hovertext]
    merged_events = sum(int(text[3:].split(" ")[0].replace(",", "")) for text in hovers if " events</b>" in text)
    assert merged_events == total - alone


@pytest.mark.parametrize("longest", [1, 400])
def test_a_page_with_plotly_inlined_is_below_2_mb(longest: int) -> None:
    trace = trace_of(60_000)
    names = trace.operations["name"].cat.rename_categories(lambda name: str(name) + "x" * longest)
    long = Trace(
        trace.source, trace.ranges, trace.operations.assign(name=names), trace.calls, processes=trace.processes
    )
    assert len(figure_page(timeline(long)).encode()) < MOST_BYTES


def test_colours_are_the_stages() -> None:
    figure, lanes = timeline(PAIR), build_lanes(PAIR)
    for trace, strip in zip(bars(figure), lanes.strips, strict=True):
        lanes_of_strip = (lanes.lane >= strip.first) & (lanes.lane < strip.first + strip.lanes)
        assert sorted(trace.marker.color) == sorted(lanes.shade[lanes_of_strip])
        scale = dict(trace.marker.colorscale)
        assert set(scale.values()) == set(SHADE_COLORS.values())
    legend = {trace.name: trace.marker.color for trace in figure.data if trace.type == "scatter"}
    assert legend == {SHADES[shade]: SHADE_COLORS[SHADES[shade]] for shade in np.unique(lanes.shade)}
    assert {stage: SHADE_COLORS[stage] for stage in STAGE_COLORS} == STAGE_COLORS


def test_hovers_tell_name_stage_and_duration() -> None:
    recorder = Recorder()
    recorder.range("decode/layer.0/mlp", 0, 100)
    recorder.kernel(10, 20, 62, name="void gemv<float>(int)")
    texts = {text for trace in bars(timeline(recorder.trace())) for text in trace.hovertext}
    assert texts >= {"<b>decode/layer.0/mlp</b><br>mlp<br>0.1000 ms", "<b>gemv</b><br>mlp<br>0.04200 ms"}


def test_two_traces_share_an_axis_that_begins_with_their_first_steps() -> None:
    figure = timeline(PAIR)
    first, second = figure.layout.xaxis, figure.layout.xaxis2
    assert first.matches == "x2" or second.matches == "x"
    assert "first decode step" in second.title.text
    for side in ("y", "y2"):
        steps = next(trace for trace in bars(figure) if (trace.yaxis or "y") == side)
        assert min(base for base, text in zip(steps.base, steps.hovertext, strict=True) if "decode/step" in text) == 0
    assert [sum(name in text for text in annotations(figure)) for name in PAIR] == [1, 1]


def test_a_few_steps_fill_the_page() -> None:
    figure, lanes = timeline(PAIR, steps=2), build_lanes(PAIR)
    begin, end = figure.layout.xaxis.range
    steps = np.flatnonzero((lanes.texts[lanes.name] == "decode/step") & (lanes.source < 3))
    assert begin < 0 < lanes.end[steps[1]] / 1e6 < end < lanes.end[steps[2]] / 1e6
    for trace in bars(figure):
        assert np.all(trace.base >= np.float32(begin))
        assert np.all(trace.base + trace.x <= end * (1 + 1e-6))
    assert re.match(rf"[\d,]+ of {len(lanes):,} events", subtitle(figure))


def test_a_window_is_taken_as_it_is() -> None:
    assert timeline(PAIR, window=(0.1, 0.25)).layout.xaxis.range == (0.1, 0.25)


def test_a_window_without_events_is_empty_and_says_so() -> None:
    assert subtitle(timeline(PAIR, window=(900, 901))).startswith("0 of ")


def test_a_trace_of_nothing_is_refused() -> None:
    with pytest.raises(TraceError, match="expected a trace with some"):
        timeline(Trace(Source("nsys", "", ("empty.sqlite",))))
