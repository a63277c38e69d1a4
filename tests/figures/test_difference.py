"""The waterfall leads from one mean step to the other, and its texts are the texts of the difference."""

import json
import re
from itertools import pairwise

import plotly.graph_objects as go
import pytest
from helpers.studies.drawn import annotations, subtitle, words
from helpers.traces.handmade import FUSED, VANILLA, decode, disorder, layers

from labkit.figures.difference import COST, SAVED, difference_figure, difference_table
from labkit.figures.theme import BASELINE, CANDIDATE, SIDE_COLORS
from labkit.nsys.analysis.difference import Difference, explain


@pytest.fixture(scope="module")
def difference() -> Difference:
    vanilla, fused = (
        decode(layers(VANILLA, 2), steps=9, noise=0.1),
        decode(layers(FUSED, 2), steps=9, noise=0.1, seed=1),
    )
    return explain(vanilla, fused)


def bars(figure: go.Figure) -> list[tuple[float, float]]:
    """Start and end of each bar, in ms."""
    bar = figure.data[0]
    return [(base, base + length) for base, length in zip(bar.base, bar.x, strict=True)]


def test_each_bar_begins_where_the_one_before_it_ends(difference: Difference) -> None:
    first, *parts, last = bars(difference_figure(difference))
    assert first == (0, difference.vanilla.mean_ms)
    assert last == (0, difference.fused.mean_ms)
    assert parts[0][0] == difference.vanilla.mean_ms
    assert all(before[1] == after[0] for before, after in pairwise(parts))
    assert parts[-1][1] == pytest.approx(difference.fused.mean_ms)


def test_the_bars_are_the_parts_with_their_colours(difference: Difference) -> None:
    figure = difference_figure(difference)
    ms = difference.shown_parts["ms"]
    assert [-length for length in figure.data[0].x[1:-1]] == pytest.approx(ms.tolist())
    expected = [SAVED if saved > 0 else COST for saved in ms]
    assert list(figure.data[0].marker.color) == [SIDE_COLORS[BASELINE], *expected, SIDE_COLORS[CANDIDATE]]
    names = list(figure.layout.yaxis.ticktext)
    assert names == ["<b>vanilla</b>", *difference.shown_parts["name"], "<b>fused</b>"]


def test_the_whiskers_are_the_intervals(difference: Difference) -> None:
    parts = bars(difference_figure(difference))[1:-1]
    whiskers = difference_figure(difference).data[1:]
    assert len(whiskers) == len(parts)
    for (base, end), whisker, part in zip(parts, whiskers, difference.shown_parts.itertuples(), strict=True):
        assert whisker.x[0] == end
        assert end + whisker.error_x.array[0] == pytest.approx(base - part.low_ms)
        assert end - whisker.error_x.arrayminus[0] == pytest.approx(base - part.high_ms)


def test_every_row_tells_its_figure_and_the_title_the_claim(difference: Difference) -> None:
    figure = difference_figure(difference)
    texts = annotations(figure)
    assert len(texts) == len(difference.shown_parts) + 2
    for text, part in zip(texts[1:-1], difference.shown_parts.itertuples(), strict=True):
        assert f"{-part.ms:+.{difference.places}f} ms" in text
        assert part.note in words(re.sub("<[^b][^>]*>", "", text))
    assert difference.claim in subtitle(figure)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_parts_are_all_of_it_is_within_the_axes(seed: int) -> None:
    figure = difference_figure(explain(disorder(seed), disorder(seed + 70)))
    left, right = figure.layout.xaxis.range
    assert all(left <= edge < right for bar in bars(figure) for edge in bar)
    assert "NaN" not in json.dumps(figure.to_plotly_json(), default=lambda array: array.tolist())


def test_without_an_interval_there_are_no_whiskers() -> None:
    difference = explain(
        decode(VANILLA, steps=1), decode(FUSED, steps=1), names=("a very long name of a side indeed", "b")
    )
    figure = difference_figure(difference)
    assert len(figure.data) == 1
    assert "no interval" in subtitle(figure)
    assert "<br>" in figure.layout.yaxis.ticktext[0]
    assert difference_table(difference)["95 % interval"].eq("").all()


def test_the_table_has_a_row_for_every_part(difference: Difference) -> None:
    table = difference_table(difference)
    assert table.index.tolist() == difference.parts["name"].tolist()
    assert [float(text) for text in table["ms saved"]] == pytest.approx(difference.parts["ms"].tolist(), abs=0.001)
