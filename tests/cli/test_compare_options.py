"""Options of `labkit compare` that are given as text."""

import pytest

from labkit.cli.measuring import fraction


@pytest.mark.parametrize(("text", "value"), [("2%", 0.02), ("0.02", 0.02), (" 5 % ", 0.05), ("100%", 1.0)])
def test_a_part_is_given_in_percent_or_as_a_fraction(text: str, value: float) -> None:
    assert fraction("precision", text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "%", "narrow", "2%%", "2 % of it"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a part, such as 2% or 0\.02"):
        fraction("precision", text)
