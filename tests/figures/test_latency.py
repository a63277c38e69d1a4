"""The latency figures show the figures of the record."""

import numpy as np
import pytest
from helpers.studies.comparisons import BANDWIDTH_GB_S, comparison
from helpers.studies.drawn import annotations, subtitle, texts, words

from labkit.figures import latency_figure, per_token_figure
from labkit.studies.comparison_words import outcome, speedup_line


def test_bars_are_as_long_as_the_records_say() -> None:
    record = comparison()
    bars = {bar.name: bar for bar in per_token_figure(record).data}
    for side in (record.baseline, record.candidate):
        assert bars[side.name].x == (side.per_token_ms,)


def test_whiskers_span_the_rounds() -> None:
    record = comparison()
    bar = per_token_figure(record).data[1]
    rounds = record.candidate.rounds_ms("per_token")
    assert bar.x[0] + bar.error_x.array[0] == pytest.approx(max(rounds))
    assert bar.x[0] - bar.error_x.arrayminus[0] == pytest.approx(min(rounds))


def test_the_floor_is_drawn_where_the_bandwidth_puts_it() -> None:
    record = comparison()
    (floor,) = [shape for shape in per_token_figure(record).layout.shapes if shape.name == "floor"]
    assert floor.x0 == floor.x1 == pytest.approx(498e6 / (BANDWIDTH_GB_S * 1e9) * 1e3)


def test_each_side_says_its_share_of_the_limit() -> None:
    record = comparison()
    written = texts(per_token_figure(record))
    for side in (record.baseline, record.candidate):
        assert f"{side.floor_share:.0%} of the limit" in written


def test_without_a_probe_there_is_no_floor_and_the_figure_says_so() -> None:
    figure = per_token_figure(comparison(probed=False))
    assert not figure.layout.shapes
    assert any("limit unknown: no bandwidth" in text for text in annotations(figure))


def test_without_counted_work_the_figure_does_not_blame_the_probe() -> None:
    record = comparison()
    uncounted = record.model_copy(
        update={role: getattr(record, role).model_copy(update={"work": None}) for role in ("baseline", "candidate")}
    )
    figure = per_token_figure(uncounted)
    assert not figure.layout.shapes
    assert any("limit unknown: what a step of this model reads" in text for text in annotations(figure))
    assert outcome(uncounted).claim == speedup_line(uncounted)
    assert "of the memory limit" in outcome(record).claim


def test_the_title_gives_ratio_interval_baseline_and_verdict() -> None:
    record = comparison()
    title = words(per_token_figure(record).layout.title.text)
    assert all(part in title for part in (str(record.ratio("per_token")), "hf-eager", "FASTER"))


def test_where_the_weights_come_from_is_always_said() -> None:
    record = comparison()
    for figure in (latency_figure(record), per_token_figure(record)):
        assert "random weights, seed 0" in subtitle(figure)


def test_every_sample_is_in_the_distributions() -> None:
    record = comparison(rounds=3, new_tokens=5)
    boxes = list(latency_figure(record).data)
    expected = [
        side.samples_ms[metric]
        for metric in ("ttft", "per_token", "end_to_end")
        for side in (record.baseline, record.candidate)
    ]
    assert [box.boxpoints for box in boxes] == ["all"] * 6
    for box, samples in zip(boxes, expected, strict=True):
        np.testing.assert_array_equal(box.x, samples)


def test_axes_start_at_zero_and_hold_every_sample() -> None:
    record = comparison()
    figure = latency_figure(record)
    for axis, metric in ((figure.layout.xaxis, "ttft"), (figure.layout.xaxis2, "per_token")):
        assert axis.range[0] == 0
        assert axis.range[1] > max(record.baseline.samples_ms[metric])


def test_a_side_against_itself_has_two_bars() -> None:
    record = comparison()
    itself = record.model_copy(update={"baseline": record.candidate})
    assert len({bar.y for bar in per_token_figure(itself).data}) == 2
