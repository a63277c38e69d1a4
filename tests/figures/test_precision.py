"""The figures of precisions show the results of the study and name what is missing."""

import re

import pytest
from helpers.studies.drawn import subtitle, texts
from helpers.studies.precision_studies import RANDOM, SIDES, study

from labkit.figures import (
    costs_figure,
    errors_figure,
    front_figure,
    outliers_figure,
    precision_answers,
    precision_table,
    study_notes,
)
from labkit.figures.theme import LIMIT


def test_every_side_is_a_point_at_its_time_and_kl_and_0_is_at_the_bottom() -> None:
    points = {trace.name: trace for trace in front_figure(study()).data if trace.name in SIDES and trace.yaxis == "y"}
    assert {name: point.x[0] for name, point in points.items()} == {name: ms for name, (ms, *_) in SIDES.items()}
    assert points["int4-64+head8"].y[0] == pytest.approx(0.3)
    assert points["float32"].y[0] == min(point.y[0] for point in points.values())
    assert points["float32"].y[0] > 0


def test_the_line_joins_the_front_from_the_fastest_on() -> None:
    (line,) = [trace for trace in front_figure(study()).data if trace.mode == "lines"]
    assert tuple(line.x) == (8.0, 9.0, 40.0)


def test_random_weights_have_no_perplexity() -> None:
    trained, random = study(), study(origin=RANDOM)
    assert "perplexity" in texts(front_figure(trained))
    assert "perplexity" not in texts(front_figure(random))
    assert "| perplexity |" in precision_table(trained)
    assert "perplexity" not in precision_table(random)
    assert "perplexity means nothing" in study_notes(random)


def test_every_side_has_the_mark_of_its_limit() -> None:
    figure = costs_figure(study())
    (marks,) = [trace for trace in figure.data if trace.type == "scatter"]
    assert marks.marker.color == LIMIT
    assert set(marks.y) == SIDES.keys()
    assert all(mark == pytest.approx(498e6 / 60e9 * 1e3, rel=0.05) for mark in marks.x)


def test_the_table_has_a_row_for_each_side_and_says_what_cannot_be() -> None:
    lines = precision_table(study()).splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert [re.findall("`(.*)`", row)[0] for row in rows] == [side.precision for side in study().by_time]
    assert {line.count("|") for line in lines if line.startswith("|")} == {lines[0].count("|")}
    assert "- `int4-128` cannot be: group_size=128 does not divide the 64 inputs." in lines
    assert not re.search(r"\b(nan|None|_ms|inf)\b", "\n".join(lines))


def test_each_way_to_store_the_layers_that_loses_has_a_map_and_those_that_do_not_are_named() -> None:
    figure = errors_figure(study())
    assert not isinstance(figure, str)
    assert len(figure.data) == 3  # five sides, less float32 (no codes) and int4-32 (no loss)
    assert all(share == pytest.approx(1) for trace in figure.data for line in trace.z for share in line)
    assert figure.data[2].customdata[0][0] == pytest.approx(8)
    assert "<b>int4-64</b>: 8.00 %, all together" in texts(figure)
    assert "such codes before: int4-32" in subtitle(figure)
    assert {(axis.tick0, axis.dtick) for axis in figure.select_xaxes()} == {(0, 1)}  # every tick is at a layer
    assert figure.layout.xaxis3.title.text == "layer"


def test_shares_of_rows_and_of_groups_are_of_all() -> None:
    numbers, rows, groups = outliers_figure(study()).data
    assert sum(height or 0 for height in numbers.y) == 108
    assert sum(rows.y) == pytest.approx(100)
    assert "of 32 inputs, median 2.50" in groups.name


def test_the_notes_say_that_exact_codes_flatter_4_bits() -> None:
    notes = study_notes(study())
    assert "`int4-32` loses nothing of the layers" in notes
    assert "2.0 times as fine" in notes


def test_answers_are_side_by_side_and_none_is_said() -> None:
    answers = precision_answers(study(answers=dict.fromkeys(SIDES, "Over | there.")))
    assert answers.count("Over \\| there.") == len(SIDES)
    assert "no chat template" in precision_answers(study())
