"""`labkit evaluate`: a table or one JSON object, a record, and refused requests."""

import json
from pathlib import Path

import pytest
from helpers.processes.command_line import Labkit, command_line
from rich.console import Console

from labkit.cli import evaluate as evaluate_cli
from labkit.harness import load_records

SMALL = ("evaluate", "tiny-llama", "--dtype", "int8", "--tokens", "100", "--window", "50", "--threads", "1")


@pytest.fixture
def labkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    """Runs a command line in the test's folder: (exit code, stdout, stderr)."""
    monkeypatch.setattr(evaluate_cli, "out", Console(width=120))
    monkeypatch.chdir(tmp_path)
    return command_line(monkeypatch, capsys)


def test_the_table_shows_what_moved_and_keeps_a_record(labkit: Labkit, tmp_path: Path) -> None:
    code, out, _ = labkit(*SMALL)
    assert code == 0
    assert "KL divergence" in out
    assert "perplexity means nothing here" in out
    assert "random weights, seed 0" in out
    (record,) = load_records(tmp_path / "runs")
    assert record.kind == "evaluation"


def test_json_is_one_object_with_the_case(labkit: Labkit) -> None:
    code, out, _ = labkit(*SMALL, "--quant", '{"weight": {"q_groups": 4}}', "--json")
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert result["case"]["quant"] == {"weight": {"q_groups": 4}}
    assert result["kl"]["low"] < result["kl"]["value"] < result["kl"]["high"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--quant", "{"), "got --quant '{', which is not JSON"),
        (("--quant", "[1]"), "expected an object of options"),
        (("--quant", '{"weight": {"num_bits": 3}}'), "num_bits"),
        (("--text", "missing.txt"), "missing.txt cannot be read"),
        (("--against", "gold"), "unknown precision 'gold'"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(arguments: tuple[str, ...], message: str, labkit: Labkit) -> None:
    code, out, err = labkit(*SMALL, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
