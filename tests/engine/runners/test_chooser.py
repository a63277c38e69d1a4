"""How a call's rows are divided between micro-batches, by times that are made up."""

from typing import Any
from unittest import mock

import pytest

from labkit.engine.parallel.micro_batch_counts import Compared, MicroBatchCounts
from labkit.engine.runners.pipeline.chooser import Chooser, Division, Lap

PROMPT = 9


def chooser(
    several_ms: float = 1.0, one_ms: float = 1.0, counts: MicroBatchCounts | None = None, **begun: Any
) -> Chooser:
    """Of eight rows in as many micro-batches as there are stages, two; laps take what is given."""
    call: dict[str, Any] = {"stages": 2, "rows": 8, "micro_batches": 2, "prompt": PROMPT, "again": True, "tries": True}
    shared = mock.Mock(side_effect=[several_ms, one_ms] * 9)
    return Chooser(Division(**call | {"longest": None} | begun), counts or MicroBatchCounts(), shared, mock.Mock())


def laps(of: Chooser, rows: int = 8) -> list[int]:
    """The micro-batches of each lap until one has no end."""
    lap, tokens, found = of.first(), PROMPT, list[int]()
    while True:
        found.append(lap.micro_batches)
        if lap.until is None:
            return found
        for place in range(tokens + 1, lap.until + 1):
            of.chose(place)
        tokens = lap.until
        lap = of.next(rows, tokens)


@pytest.mark.parametrize(
    ("several_ms", "one_ms", "wanted"),
    [
        (1.0, 0.5, [2, 1, 2, 1, 1]),  # clear, and so once more
        (1.0, 0.9, [2, 1, 2, 1, 1]),
        (1.0, 0.99, [2, 1, 2, 1, 2]),  # a tie: several
        (1.0, 1.05, [2, 1, 2, 1, 2]),
        (1.0, 1.8, [2, 1, 2]),  # hopeless at once
    ],
)
def test_one_micro_batch_is_taken_where_it_is_clearly_faster(
    several_ms: float, one_ms: float, wanted: list[int]
) -> None:
    counts = MicroBatchCounts()
    assert laps(chooser(several_ms, one_ms, counts)) == wanted
    assert [each.chosen for each in counts.compared] == [wanted[-1]]
    assert laps(chooser(1e9, 1e-9, counts)) == [2, 1][: 1 + (wanted[-1] == 1)]  # known: nothing is tried again


def test_pairs_that_contradict_each_other_want_a_third() -> None:
    mixed = Compared(8, PROMPT, 2).followed_by(1.0, 0.9).followed_by(1.0, 1.0)
    assert mixed.chosen is None
    assert mixed.followed_by(1.0, 0.9).chosen == 1
    assert mixed.followed_by(1.0, 1.0).chosen == 2


def test_what_was_compared_is_the_same_behind_a_message() -> None:
    found = Compared(8, PROMPT, 2).followed_by(1.5, 0.5).followed_by(1.5, 0.75)
    assert Compared.said_in(found.payload) == found
    assert str(found) == (
        "a token of 8 rows takes 1.5 ms in 2 micro-batches and 0.6 ms in one; such batches are generated in one from "
        "here on"
    )


def test_what_is_known_of_some_rows_serves_others() -> None:
    counts = MicroBatchCounts()
    counts.note(Compared(4, PROMPT, 2).followed_by(1.0, 0.5).followed_by(1.0, 0.5))
    counts.note(Compared(16, PROMPT, 2).followed_by(1.0, 2.0))
    assert [counts.chosen(rows, PROMPT) for rows in (2, 4, 8, 16, 32)] == [1, 1, None, 2, 2]
    assert counts.chosen(4, 10 * PROMPT) is None


@pytest.mark.parametrize("begun", [{"tries": False}, {"rows": 1, "micro_batches": 1}, {"longest": PROMPT + 9}], ids=str)
def test_nothing_is_tried_where_it_may_not_be_or_makes_no_sense(begun: dict[str, Any]) -> None:
    assert laps(chooser(**begun), begun.get("rows", 8)) == [begun.get("micro_batches", 2)]


def test_a_lap_in_which_rows_end_counts_for_nothing() -> None:
    counts = MicroBatchCounts()
    tried = chooser(1.0, 0.1, counts)
    lap = tried.first()
    assert lap.until is not None
    for tokens in range(PROMPT + 1, lap.until + 1):
        tried.chose(tokens)
    assert tried.next(7, lap.until) == Lap(2, None)
    assert counts.compared == ()


@pytest.mark.parametrize(
    ("sizes", "count", "pauses"),
    [
        ((4, 4, 4, 3), 4, False),  # no few
        ((2, 2, 2, 2), 2, True),  # of sixteen in fours
        ((4, 4), 2, False),  # as they would be divided
        ((7, 1), 2, True),
        ((2, 1), 2, False),
        ((3,), 2, True),  # one stage has nothing to do
        ((1,), 1, False),
    ],
)
def test_few_rows_are_divided_anew_if_that_changes_anything(sizes: tuple[int, ...], count: int, pauses: bool) -> None:
    """As many rows in each as at the beginning, but something for each stage."""
    of = chooser(rows=16, micro_batches=4, tries=False)
    assert of.first() == Lap(4, None)
    assert of.pauses(sizes, 20) == pauses
    assert of.several(sum(sizes)) == (4 if sum(sizes) > 12 else count)
    assert not chooser(rows=16, micro_batches=4, tries=False, again=False).pauses(sizes, 20)
