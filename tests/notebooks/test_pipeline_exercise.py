"""The exercise on pipelines accepts every order that works, and no order that only seems to work."""

from itertools import product
from typing import Any

import plotly.graph_objects as go
import pytest
from helpers.studies.pipeline_studies import STAGES, study

from labkit.notebooks.pipeline_exercise import LEAST, TOKENS, check_pipeline, drawn_order, pipeline_puzzle

PARTS = 9 * (STAGES + 1)  # computed by hand: (P - 1) / (m + P - 1) is a tenth
RIGHT = ("ABCABCABDABDABEABE", "BAEBAEBADBADBACBAC", "abc abc, abd abd, abe abe")


def verdicts(parts: object, order: object) -> list[str]:
    return str(check_pipeline(study(), parts, order).data).splitlines()


@pytest.mark.parametrize("order", RIGHT)
def test_any_order_without_a_bubble_is_right(order: str) -> None:
    assert all("**right**" in line for line in verdicts(PARTS, order))
    assert isinstance(drawn_order(study(), order), go.Figure)


def test_the_queue_itself_is_not_enough() -> None:
    queue = "ABCDEABCDE" + "AB" * 4
    assert "and 10.0% is possible" in verdicts(None, queue)[1]
    shown = str(pipeline_puzzle(study()).data)
    assert "bubble 22%" in shown
    assert f"{LEAST:.0%}" == "10%"


@pytest.mark.parametrize(
    ("order", "hint"),
    [
        ("ABC", "A has 1 turns, expected 6"),
        ("ABCABCABDABDABEABEA", "A has 7 turns"),
        ("ABCABCABDABDABEABX", "expected letters of A, B, C, D, E"),
        (("A", "B"), "expected a text"),
        (7, "expected a text"),
        (None, "not answered yet"),
    ],
)
def test_what_is_no_order_is_told_why(order: Any, hint: str) -> None:
    assert hint in verdicts(None, order)[1]
    drawn = drawn_order(study(), order)
    assert isinstance(drawn, go.Figure) if order is None else hint in str(drawn.data)


@pytest.mark.parametrize(
    ("parts", "hint"),
    [
        (PARTS - 1, "slightly above"),
        (PARTS + 1, "one fewer is enough"),
        (STAGES + 2, "fills the stages once"),
        (9 * (STAGES - 1), "the stages that were measured"),
        ("27", "expected a number"),
    ],
)
def test_a_wrong_number_is_told_its_mistake(parts: Any, hint: str) -> None:
    assert hint in verdicts(parts, None)[0]


def test_no_order_beats_filling_and_draining() -> None:
    """Tries all ways to place the short sequences between turns of the long ones: each is judged right."""
    for fill in product("CDE", repeat=6):
        order = "".join(f"AB{letter}" for letter in fill)
        if all(order.count(name) == count for name, count in TOKENS.items()):
            assert "**right**" in verdicts(None, order)[1]
