"""Values of notebooks in the types of their settings, and the error message for a value that does not fit."""

from __future__ import annotations

from typing import Any


def typed(value: object, kind: type) -> Any:
    """A value of a notebook in the type int, float or str. TypeError if it has another type.

    An integer is also a float. A number is also a text, and so is a list, with commas: `papermill -p batches 4` writes
    a number into the notebook.
    """
    if not isinstance(value, bool):
        if kind is float and isinstance(value, int):
            return float(value)
        if kind is str and isinstance(value, list | tuple):
            return ", ".join(map(str, value))
        if kind is str and isinstance(value, int | float):
            return str(value)
    if type(value) is not kind:
        raise TypeError(kind.__name__)
    return value


def refusal(name: str, got: object, expected: str) -> str:
    """The error message for a value of a setting or of a notebook's parameter."""
    return f"got {name} = {got!r}, expected {expected}"
