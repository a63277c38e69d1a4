"""The room that words take in a figure."""

import pytest

from labkit.figures.room import MOST_TICKS, NARROW, bars_axis, width_of


@pytest.mark.parametrize("most", [1.5, 12.0, 300.0, 1e4, 1e6, 1e13, 1e30])
@pytest.mark.parametrize("least", [1e-9, 0.01, 1.0])
def test_the_ticks_of_an_axis_fit_next_to_each_other(least: float, most: float) -> None:
    axis = bars_axis([least, most], ["a", "b"], left=90)
    if axis.get("type") == "log":
        assert 1 <= len(axis["tickvals"]) <= 3 * MOST_TICKS
        assert sum(width_of(text, 11) for text in axis["ticktext"]) < NARROW
