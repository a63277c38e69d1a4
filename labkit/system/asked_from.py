"""Names of settings in remedies: options on the command line, parameters in notebooks and functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_options: ContextVar[frozenset[str] | None] = ContextVar("options", default=None)  # None: no command is running


@contextmanager
def from_command_line() -> Iterator[None]:
    """Inside this context `setting` names command-line options."""
    token = _options.set(frozenset())
    try:
        yield
    finally:
        _options.reset(token)


def command_has(options: Iterable[str]) -> None:
    """Notes the options of the running command, as they are typed ("--budget-s")."""
    if on_command_line():
        _options.set(frozenset(name.lstrip("-").replace("-", "_") for name in options))


def on_command_line() -> bool:
    """Whether a labkit command is running."""
    return _options.get() is not None


def offered(*parameters: str) -> tuple[str, ...]:
    """The parameters that the running command has as options; all of them if its options are not known."""
    options = _options.get()
    return tuple(name for name in parameters if not options or name in options)


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
