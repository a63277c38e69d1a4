"""How the rows of a call are divided into micro-batches, with invented times."""

from typing import Any
from unittest import mock

import pytest

from labkit.engine.parallel.micro_batch_counts import Compared, MicroBatchCounts
from labkit.engine.runners.pipeline.chooser import Chooser, Division, Lap

PROMPT = 9


def chooser(
    several_ms: float = 1.0, one_ms: float = 1.0, counts: MicroBatchCounts | None = None, **options: Any
) -> Chooser:
    """Chooser for eight rows on two stages, with two micro-batches; laps take the given times."""
    call: dict[str, Any] = {"stages": 2, "rows": 8, "micro_batches": 2, "prompt": PROMPT, "again": True, "tries": True}
    shared = mock.Mock(side_effect=[several_ms, one_ms] * 9)
    return Chooser(Division(**call | {"longest": None} | options), counts or MicroBatchCounts(), shared, mock.Mock())


def laps(choice: Chooser, rows: int = 8) -> list[int]:
    """Number of micro-batches of each lap, until a lap without an end."""
    lap, tokens, counts = choice.first(), PROMPT, list[int]()
    while True:
        counts.append(lap.micro_batches)
        if lap.until is None:
            return counts
        for token in range(tokens + 1, lap.until + 1):
            choice.chose(token)
        tokens = lap.until
        lap = choice.next(rows, tokens)


@pytest.mark.parametrize(
    ("several_ms", "one_ms", "expected"),
    [
        (1.0, 0.5, [2, 1, 2, 1, 1]),  # clear in two pairs
        (1.0, 0.9, [2, 1, 2, 1, 1]),
        (1.0, 0.99, [2, 1, 2, 1, 2]),  # a tie: several micro-batches
        (1.0, 1.05, [2, 1, 2, 1, 2]),
        (1.0, 1.8, [2, 1, 2]),  # clear after one pair
    ],
)
def test_one_micro_batch_is_taken_where_it_is_clearly_faster(
    several_ms: float, one_ms: float, expected: list[int]
) -> None:
    counts = MicroBatchCounts()
    assert laps(chooser(several_ms, one_ms, counts)) == expected
    assert [compared.chosen for compared in counts.compared] == [expected[-1]]
    assert laps(chooser(1e9, 1e-9, counts)) == [2, 1][: 1 + (expected[-1] == 1)]  # known, so not tried again


def test_pairs_that_contradict_each_other_want_a_third() -> None:
    mixed = Compared(8, PROMPT, 2).with_pair(1.0, 0.9).with_pair(1.0, 1.0)
    assert mixed.chosen is None
    assert mixed.with_pair(1.0, 0.9).chosen == 1
    assert mixed.with_pair(1.0, 1.0).chosen == 2


def test_what_was_compared_is_the_same_behind_a_message() -> None:
    compared = Compared(8, PROMPT, 2).with_pair(1.5, 0.5).with_pair(1.5, 0.75)
    assert Compared.from_payload(compared.payload) == compared
    assert str(compared) == (
        "a token of 8 rows takes 1.5 ms in 2 micro-batches and 0.6 ms in one; such batches are generated in one from "
        "here on"
    )


def test_what_is_known_of_some_rows_serves_others() -> None:
    counts = MicroBatchCounts()
    counts.note(Compared(4, PROMPT, 2).with_pair(1.0, 0.5).with_pair(1.0, 0.5))
    counts.note(Compared(16, PROMPT, 2).with_pair(1.0, 2.0))
    assert [counts.chosen(rows, PROMPT) for rows in (2, 4, 8, 16, 32)] == [1, 1, None, 2, 2]
    assert counts.chosen(4, 10 * PROMPT) is None


@pytest.mark.parametrize(
    "options", [{"tries": False}, {"rows": 1, "micro_batches": 1}, {"longest": PROMPT + 9}], ids=str
)
def test_nothing_is_tried_where_it_may_not_be_or_makes_no_sense(options: dict[str, Any]) -> None:
    assert laps(chooser(**options), options.get("rows", 8)) == [options.get("micro_batches", 2)]


def test_a_lap_in_which_rows_end_counts_for_nothing() -> None:
    counts = MicroBatchCounts()
    choice = chooser(1.0, 0.1, counts)
    lap = choice.first()
    assert lap.until is not None
    for tokens in range(PROMPT + 1, lap.until + 1):
        choice.chose(tokens)
    assert choice.next(7, lap.until) == Lap(2, None)
    assert counts.compared == ()


@pytest.mark.parametrize(
    ("sizes", "count", "pauses"),
    [
        ((4, 4, 4, 3), 4, False),  # enough rows
        ((2, 2, 2, 2), 2, True),  # left of sixteen in fours
        ((4, 4), 2, False),  # already divided like this
        ((7, 1), 2, True),
        ((2, 1), 2, False),
        ((3,), 2, True),  # one stage has nothing to do
        ((1,), 1, False),
    ],
)
def test_few_rows_are_divided_anew_if_that_changes_anything(sizes: tuple[int, ...], count: int, pauses: bool) -> None:
    """Micro-batches keep their initial number of rows, but every stage gets some."""
    choice = chooser(rows=16, micro_batches=4, tries=False)
    assert choice.first() == Lap(4, None)
    assert choice.pauses(sizes, 20) == pauses
    assert choice.several(sum(sizes)) == (4 if sum(sizes) > 12 else count)
    assert not chooser(rows=16, micro_batches=4, tries=False, again=False).pauses(sizes, 20)
