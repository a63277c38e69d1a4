"""What the README tells a newcomer to type does what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from labkit.notebooks import read_parameters

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
PROGRAMS = [text for language, text in BLOCKS if language == "python"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for folder in ("notebooks", "profiles"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    return tmp_path


def run(*command: str | Path, cwd: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_there_is_something_to_run() -> None:
    assert COMMANDS
    assert PROGRAMS


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command: str, place: Path) -> None:
    """`make` targets are only looked up: each of them does a whole session's work. So are notebooks and their
    parameters: tests/notebooks runs them all, by `labkit run` and by papermill.
    """
    if command.startswith("make "):
        run("make", "--dry-run", *command.split()[1:], cwd=ROOT)
    elif found := re.fullmatch(r"(?:labkit run|papermill) (\S+\.ipynb)(?: \S+\.ipynb)?((?: -p \S+ \S+)*)", command):
        known = {parameter.name for parameter in read_parameters(nbformat.read(place / found[1], as_version=4))}
        assert set(found[2].split()[1::3]) <= known
    else:
        run("bash", "-c", command, cwd=place)


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_program_runs(program: str, place: Path) -> None:
    run(sys.executable, "-P", "-c", program, cwd=place)


def test_parameters_are_the_notebooks() -> None:
    (sentence,) = re.findall(r"^The notebook's parameters are (.*?);", README, flags=re.MULTILINE | re.DOTALL)
    notebook = nbformat.read(ROOT / "notebooks" / "01_vanilla_vs_fused.ipynb", as_version=4)
    assert re.findall(r"`(\w+)`", sentence) == [parameter.name for parameter in read_parameters(notebook)]


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_every_ratio_is_one_that_was_measured() -> None:
    ratios = set(re.findall(r"\d+\.\d\dx \[[^\]]+\]", README))
    measured = "".join(page.read_text() for page in (ROOT / "profiles").glob("*.md"))
    assert ratios
    assert {ratio for ratio in ratios if ratio not in measured} == set()
