"""Names of settings in remedies: options on the command line, parameters in notebooks and functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_on_command_line = ContextVar("on_command_line", default=False)


@contextmanager
def from_command_line() -> Iterator[None]:
    """Inside, `setting` names options."""
    token = _on_command_line.set(True)
    try:
        yield
    finally:
        _on_command_line.reset(token)


def on_command_line() -> bool:
    """Whether a command of labkit's runs."""
    return _on_command_line.get()


def setting(*parameters: str) -> str:
    """The names of these parameters where they can be given: "--rounds or --budget-s", elsewhere "the parameters rounds
    or budget_s".
    """
    if on_command_line():
        return " or ".join(f"--{name.replace('_', '-')}" for name in parameters)
    return f"the parameter{'s' * (len(parameters) > 1)} {' or '.join(parameters)}"


def given(parameter: str, value: str) -> str:
    """A parameter with its value, a word, as it is given: "--source torch", elsewhere "source='torch'"."""
    return f"--{parameter.replace('_', '-')} {value}" if on_command_line() else f"{parameter}={value!r}"
