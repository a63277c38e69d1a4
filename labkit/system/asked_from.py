"""Names of settings in remedies: options on the command line, parameters in notebooks and functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_on_command_line = ContextVar("on_command_line", default=False)


@contextmanager
def from_command_line() -> Iterator[None]:
    """Inside this context `setting` names command-line options."""
    token = _on_command_line.set(True)
    try:
        yield
    finally:
        _on_command_line.reset(token)


def on_command_line() -> bool:
    """Whether a labkit command is running."""
    return _on_command_line.get()


def setting(*parameters: str) -> str:
    """The names of these parameters: "--rounds or --budget-s" on the command line, "the parameters rounds or budget_s"
    in a notebook or a function.
    """
    if on_command_line():
        return " or ".join(f"--{name.replace('_', '-')}" for name in parameters)
    return f"the parameter{'s' * (len(parameters) > 1)} {' or '.join(parameters)}"


def given(parameter: str, value: str) -> str:
    """A parameter with its value, a word: "--source torch" on the command line, else "source='torch'"."""
    return f"--{parameter.replace('_', '-')} {value}" if on_command_line() else f"{parameter}={value!r}"
