"""Options of `labkit compare` that are given as text."""

import pytest

from labkit.cli.measuring import fraction
from labkit.system.asked_from import command_has, from_command_line


@pytest.mark.parametrize(("text", "value"), [("2%", 0.02), ("0.02", 0.02), (" 5 % ", 0.05), ("100%", 1.0)])
def test_a_part_is_given_in_percent_or_as_a_fraction(text: str, value: float) -> None:
    assert fraction("precision", text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "%", "narrow", "2%%", "2 % of it"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a part, such as 2% or 0\.02"):
        fraction("precision", text)


def test_a_data_type_in_its_place_is_told_the_option_of_data_types() -> None:
    with from_command_line():
        command_has(["--precision", "--dtype"])
        with pytest.raises(ValueError, match=r"got precision = 'int8', .*; the data type of the weights is --dtype$"):
            fraction("precision", "int8")
        command_has(["--precision"])
        with pytest.raises(ValueError, match=r"such as 2% or 0\.02$"):
            fraction("precision", "int8")
