"""Studies that are measured in part, so that finished parts can be shown while the rest is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from labkit.system.errors import RunError

Study = TypeVar("Study")
Show = Callable[[Any], None]  # takes the study with the parts that are measured so far


class NotMeasuredError(RunError):
    """A part of a study was read before it was measured."""


class _Partly:
    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # Python and IPython look for such names, and accept that they are missing
            raise AttributeError(name)
        raise NotMeasuredError(f"{name} is not measured yet; wait for the end of the run")


def so_far(kind: type[Study], /, **parts: object) -> Study:
    """A study (a dataclass or a record) with these fields only.

    Reading another field raises NotMeasuredError. But a field of a dataclass that has a default value reads as this
    value, because the class holds it.
    """
    partly = type(kind.__name__, (_Partly, kind), {})
    study: Study = object.__new__(partly)  # without __init__, which would require all fields
    study.__dict__.update(parts)
    return study


def unseen(study: object) -> None:
    """Shows nothing, for runs without a viewer."""
