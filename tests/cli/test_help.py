"""What the command line says of itself."""

import pytest
from command_line import Labkit, command_line

import labkit as package


@pytest.fixture
def labkit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    return command_line(monkeypatch, capsys)


def test_the_version_is_that_of_the_package(labkit: Labkit) -> None:
    assert labkit("--version") == (0, f"labkit {package.__version__}\n", "")


@pytest.mark.parametrize("command", [(), ("compare",), ("peers", "install"), ("profile",), ("run",), ("launch",)])
def test_help_has_a_short_name_everywhere(command: tuple[str, ...], labkit: Labkit) -> None:
    short, long = labkit(*command, "-h"), labkit(*command, "--help")
    assert short == long
    assert short[0] == 0
    assert "Usage: " in short[1]


def test_completion_can_be_installed(labkit: Labkit) -> None:
    assert "--install-completion" in labkit("--help")[1]
