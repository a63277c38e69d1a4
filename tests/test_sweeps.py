"""Every value that `make test` skips in some combination is tested in another combination."""

from itertools import product
from typing import Any

import pytest
from helpers.sweeps import crossed, paired, sweep, swept

AXES: tuple[Any, ...] = (["a", "b", "c", "d", "e"], {"one": 1, "two": 2, "three": 3}, [False, True])
VALUES = [list(axis.values()) if isinstance(axis, dict) else axis for axis in AXES]


def values_of(cases: list[Any], *, kept: bool) -> list[tuple[Any, ...]]:
    return [case.values for case in cases if kept is (sweep.mark not in [mark.mark for mark in case.marks])]


def test_kept_and_swept_combinations_are_all_there_are() -> None:
    cases = crossed(*AXES)
    everything = list(product(*VALUES))
    assert sorted(values_of(cases, kept=True) + values_of(cases, kept=False)) == sorted(everything)
    assert len({case.id for case in cases}) == len(everything)
    assert values_of(cases, kept=False)


@pytest.mark.parametrize("axis", range(3))
def test_every_value_is_kept_beside_the_first_of_the_others_and_all_move_together(axis: int) -> None:
    kept = values_of(crossed(*AXES), kept=True)
    first = [values[0] for values in VALUES]
    for value in VALUES[axis]:
        assert (*first[:axis], value, *first[axis + 1 :]) in kept
    assert [case for case in kept if sum(part != base for part, base in zip(case, first, strict=True)) == 3]


def test_of_pairs_every_value_is_kept_in_as_few_as_can_be() -> None:
    for first, second in (AXES[:2], AXES[1::-1]):
        cases = paired(first, second)
        kept, everything = values_of(cases, kept=True), values_of(cases, kept=True) + values_of(cases, kept=False)
        assert len(kept) == 5
        assert len(everything) == len(set(everything)) == 15
        assert [len({case[axis] for case in kept}) for axis in (0, 1)] == [len(first), len(second)]


def test_the_few_are_kept_by_name() -> None:
    cases = swept({"one": 1, "two": 2}, ["two"])
    assert (values_of(cases, kept=True), values_of(cases, kept=False)) == ([(2,)], [(1,)])
    with pytest.raises(AssertionError, match="expected some of"):
        swept(["a"], ["b"])
