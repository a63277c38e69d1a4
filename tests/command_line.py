"""The `labkit` command in the test's own process, which spares each test the seconds that torch takes to load."""

import sys
from collections.abc import Callable

import pytest

from labkit.cli import main as cli

Labkit = Callable[..., tuple[int, str, str]]  # the words behind `labkit` -> exit code, stdout, stderr


def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    """Runs a command line to its exit."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["labkit", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        assert isinstance(code, int)
        return (code, *capsys.readouterr())

    return run
