"""`labkit sides`: the table of sides, for people and as JSON."""

import json
import subprocess
import sys

import pytest
from helpers.processes.command_line import Labkit, command_line
from rich.console import Console

from labkit.cli import sides as sides_cli
from labkit.harness.compare.sides import SIDES


@pytest.fixture
def labkit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    monkeypatch.setattr(sides_cli, "out", Console(width=160))
    return command_line(monkeypatch, capsys)


def test_every_side_is_listed_with_its_sentence(labkit: Labkit) -> None:
    code, out, _ = labkit("sides")
    assert code == 0
    for row in SIDES.values():
        (line,) = (line for line in out.splitlines() if line.startswith(f"{row.name} "))
        assert line.rstrip().endswith(row.sentence)
        assert line.split()[1:4] == [row.device, row.weights, row.models]
        assert not row.needs or f"{row.needs}: " in out


def test_json_has_every_side(labkit: Labkit) -> None:
    code, out, _ = labkit("sides", "--json")
    assert code == 0
    listed = json.loads(out)["sides"]
    assert [side["name"] for side in listed] == list(SIDES)
    assert {side["needs"] for side in listed} >= {"", "pip install accelerate", "labkit peers install llama.cpp"}


def test_the_help_of_compare_names_the_sides(labkit: Labkit) -> None:
    code, out, _ = labkit("compare", "--help")
    assert code == 0
    words = "".join(out.replace("│", " ").split())
    assert all(row.name in words for row in SIDES.values() if not row.peer)


def test_the_list_does_not_import_torch() -> None:
    program = "import sys; from labkit.cli.sides import sides; sides(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True)
