"""The `labkit` command in the test's own process, which saves each test the seconds that torch takes to load."""

import sys
from collections.abc import Callable

import pytest

from labkit.cli import main as cli

Labkit = Callable[..., tuple[int, str, str]]  # arguments of `labkit` -> exit code, stdout, stderr


def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    """Returns a function that runs a command line until it exits."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["labkit", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        assert isinstance(code, int)
        return (code, *capsys.readouterr())

    return run
