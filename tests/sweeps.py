"""Which cases of a property `make test` proves, and which only `make test-all` does.

A product of models, types, shapes and instruction sets states one property hundreds of times. `crossed` keeps all of
them as cases of one test, and marks as `sweep` those that `make test` can do without: each value has been seen before.
"""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import pytest

sweep = pytest.mark.sweep
Axis = Mapping[str, Any] | Iterable[Any]


def crossed(*axes: Axis) -> list[Any]:
    """Every combination of one value from each axis, for `parametrize`; a mapping's keys are the names of its values.

    Not swept are each value of each axis beside the first values of all others, so the first should be those that the
    property is strictest for.
    Nor are combinations in which all values move at once, as many as the second longest axis has.
    """
    named = [_named(axis) for axis in axes]
    lengths = [len(axis) for axis in named]
    steps = sorted(lengths)[-2] if len(lengths) > 1 else 0
    together = {
        tuple(step * length // steps if length > steps else step % length for length in lengths)
        for step in range(steps)
    }
    return [
        _case(named, places, kept=sum(place > 0 for place in places) <= 1 or places in together)
        for places in product(*(range(length) for length in lengths))
    ]


def paired(one: Axis, other: Axis) -> list[Any]:
    """Every pair of values, as `crossed` has them, for slow tests. Each value of the longer axis is in one pair that is
    not swept, and each value of the shorter axis in at least one.
    """
    named = [_named(one), _named(other)]
    lengths = [len(axis) for axis in named]
    together = {tuple(step % length for length in lengths) for step in range(max(lengths))}
    return [_case(named, places, kept=places in together) for places in product(*(range(length) for length in lengths))]


def swept(values: Axis, few: Iterable[str]) -> list[Any]:
    """Every value, for `parametrize`; all but the few that are named are swept."""
    kept, named = set(few), _named(values)
    assert kept <= named.keys(), f"got {kept}, expected some of {list(named)}"
    return [pytest.param(value, id=name, marks=() if name in kept else (sweep,)) for name, value in named.items()]


def numbered(values: Iterable[Any]) -> dict[str, Any]:
    """An axis of values that have no short names."""
    return {str(number): value for number, value in enumerate(values)}


def _case(named: list[Mapping[str, Any]], places: tuple[int, ...], kept: bool) -> Any:
    """One combination, of the values in these places."""
    chosen = [list(axis.items())[place] for axis, place in zip(named, places, strict=True)]
    marks = () if kept else (sweep,)
    return pytest.param(*(value for _, value in chosen), id="-".join(name for name, _ in chosen), marks=marks)


def _named(values: Axis) -> Mapping[str, Any]:
    return values if isinstance(values, Mapping) else {str(value).removeprefix("torch."): value for value in values}
