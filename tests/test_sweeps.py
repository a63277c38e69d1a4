"""What `make test` leaves out has been seen by what it keeps."""

from itertools import product
from typing import Any

import pytest
from sweeps import crossed, paired, sweep, swept

AXES: tuple[Any, ...] = (["a", "b", "c", "d", "e"], {"one": 1, "two": 2, "three": 3}, [False, True])
VALUES = [list(axis.values()) if isinstance(axis, dict) else axis for axis in AXES]


def given(cases: list[Any], *, kept: bool) -> list[tuple[Any, ...]]:
    return [case.values for case in cases if kept is (sweep.mark not in [mark.mark for mark in case.marks])]


def test_kept_and_swept_combinations_are_all_there_are() -> None:
    cases = crossed(*AXES)
    everything = list(product(*VALUES))
    assert sorted(given(cases, kept=True) + given(cases, kept=False)) == sorted(everything)
    assert len({case.id for case in cases}) == len(everything)
    assert given(cases, kept=False)


@pytest.mark.parametrize("axis", range(3))
def test_every_value_is_kept_beside_the_first_of_the_others_and_all_move_together(axis: int) -> None:
    kept = given(crossed(*AXES), kept=True)
    first = [values[0] for values in VALUES]
    for value in VALUES[axis]:
        assert (*first[:axis], value, *first[axis + 1 :]) in kept
    assert [case for case in kept if sum(part != base for part, base in zip(case, first, strict=True)) == 3]


def test_of_pairs_every_value_is_kept_in_as_few_as_can_be() -> None:
    for one, other in (AXES[:2], AXES[1::-1]):
        cases = paired(one, other)
        kept, everything = given(cases, kept=True), given(cases, kept=True) + given(cases, kept=False)
        assert len(kept) == 5
        assert len(everything) == len(set(everything)) == 15
        assert [len({case[axis] for case in kept}) for axis in (0, 1)] == [len(one), len(other)]


def test_the_few_are_kept_by_name() -> None:
    cases = swept({"one": 1, "two": 2}, ["two"])
    assert (given(cases, kept=True), given(cases, kept=False)) == ([(2,)], [(1,)])
    with pytest.raises(AssertionError, match="expected some of"):
        swept(["a"], ["b"])
