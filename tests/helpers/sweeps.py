"""Cases of a property that `make test` runs, and cases that only `make test-all` runs.

A product of models, types, shapes and instruction sets tests one property hundreds of times. `crossed` keeps all
combinations as cases of one test. It marks as `sweep` the cases that `make test` can skip: each of their values is
tested in another case.
"""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import pytest

sweep = pytest.mark.sweep
Axis = Mapping[str, Any] | Iterable[Any]


def crossed(*axes: Axis) -> list[Any]:
    """Every combination of one value from each axis, for `parametrize`; a mapping's keys are the names of its values.

    Two kinds of combinations are not swept. In the first, at most one axis has a value other than its first; the first
    values should therefore be those for which the property is strictest. In the second, all values change at once;
    their number is the length of the second longest axis.
    """
    named_axes = [_named(axis) for axis in axes]
    lengths = [len(axis) for axis in named_axes]
    steps = sorted(lengths)[-2] if len(lengths) > 1 else 0
    together = {
        tuple(step * length // steps if length > steps else step % length for length in lengths)
        for step in range(steps)
    }
    return [
        _case(named_axes, places, kept=sum(place > 0 for place in places) <= 1 or places in together)
        for places in product(*(range(length) for length in lengths))
    ]


def paired(first: Axis, second: Axis) -> list[Any]:
    """Every pair of values, named as in `crossed`, for slow tests.

    Each value of the longer axis is in one pair that is not swept, and each value of the shorter axis in at least one.
    """
    named_axes = [_named(first), _named(second)]
    lengths = [len(axis) for axis in named_axes]
    together = {tuple(step % length for length in lengths) for step in range(max(lengths))}
    return [
        _case(named_axes, places, kept=places in together) for places in product(*(range(length) for length in lengths))
    ]


def swept(values: Axis, few: Iterable[str]) -> list[Any]:
    """Every value, for `parametrize`; all are swept except for the few named ones."""
    kept, named_values = set(few), _named(values)
    assert kept <= named_values.keys(), f"got {kept}, expected some of {list(named_values)}"
    return [
        pytest.param(value, id=name, marks=() if name in kept else (sweep,)) for name, value in named_values.items()
    ]


def numbered(values: Iterable[Any]) -> dict[str, Any]:
    """An axis of values without short names."""
    return {str(number): value for number, value in enumerate(values)}


def _case(named_axes: list[Mapping[str, Any]], places: tuple[int, ...], kept: bool) -> Any:
    """The combination of the values at these places."""
    chosen = [list(axis.items())[place] for axis, place in zip(named_axes, places, strict=True)]
    marks = () if kept else (sweep,)
    return pytest.param(*(value for _, value in chosen), id="-".join(name for name, _ in chosen), marks=marks)


def _named(values: Axis) -> Mapping[str, Any]:
    return values if isinstance(values, Mapping) else {str(value).removeprefix("torch."): value for value in values}
