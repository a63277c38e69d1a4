"""Help, version and completion of the command line."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from helpers.processes.command_line import Labkit, command_line

import labkit as package
from labkit.cli import app as cli
from labkit.system.output_folder import COPIES


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


@pytest.mark.parametrize("command", ["compare", "evaluate", "kernels", "profile", "run"])
def test_results_go_by_default_to_the_folder_that_copies_of_the_notebooks_share(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default is resolved when a command runs, and it is a path then."""
    copies = tmp_path / "runs" / "notebooks"
    copies.mkdir(parents=True)
    (copies / COPIES).touch()
    monkeypatch.chdir(copies)
    commands = vars(typer.main.get_command(cli.app))["commands"][command]
    arguments = [] if command == "kernels" else ["tiny-gpt2"]
    assert commands.make_context(command, arguments).params["output"] == tmp_path / "runs"


HEAVY = {
    "torch",
    "transformers",
    "tokenizers",
    "pandas",
    "numpy",
    "nbformat",
    "nbconvert",
    "papermill",
    "psutil",
    "plotly",
}


@pytest.mark.parametrize("command", ["--help", "--version", "models", "notebooks list", "compare --help", "trace"])
def test_what_only_says_something_loads_no_library_that_works(command: str) -> None:
    """Each takes less than half a second of processor time, most of it for Python itself, typer and rich."""
    print_modules = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    line = [sys.executable, "-P", "-c", f"{print_modules}from labkit.cli.main import main; main()", *command.split()]
    process = subprocess.run(line, capture_output=True, text=True, check=False)
    assert process.returncode == (2 if command == "trace" else 0)
    loaded = {name.partition(".")[0] for name in process.stderr.splitlines()[-1].split()}
    assert "labkit" in loaded
    assert not HEAVY & loaded


def test_the_list_of_commands_says_what_they_say() -> None:
    for name, home in cli.HOMES.items():
        assert cli._help(home) == inspect.cleandoc(typer.main.get_command(cli.app).commands[name].help)  # type: ignore[attr-defined]


def test_the_commands_stand_in_groups_by_what_they_are_for(labkit: Labkit) -> None:
    output = labkit("--help")[1]
    places = [output.index(f"─ {panel} ─") for panel in cli.PANELS]
    assert places == sorted(places)
    for place, after, homes in zip(places, [*places[1:], len(output)], cli.PANELS.values(), strict=True):
        assert all(f"│ {name} " in output[place:after] for name in homes)
