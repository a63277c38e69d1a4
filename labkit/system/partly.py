"""Studies of which only some parts are measured, so that what is known can be shown while the rest goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from labkit.system.errors import RunError

Study = TypeVar("Study")
Show = Callable[[Any], None]  # takes the study of what is measured so far


class NotMeasuredError(RunError):
    """A part of a study was asked for that is not measured yet."""


class _Partly:
    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # what Python and IPython look for, and may miss
            raise AttributeError(name)
        raise NotMeasuredError(f"{name} is not measured yet; wait for the end of the run")


def so_far(kind: type[Study], /, **parts: object) -> Study:
    """A study, a dataclass or a record, of these fields alone. NotMeasuredError where any other field is read."""
    partly = type(kind.__name__, (_Partly, kind), {})
    study: Study = object.__new__(partly)  # no field is checked: most are not there
    study.__dict__.update(parts)
    return study


def unseen(study: object) -> None:
    """Shows nothing: for runs that nobody follows."""
