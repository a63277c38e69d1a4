"""The exit code of `labkit diff` says whether something became slower."""

import json
from pathlib import Path

import pytest
from helpers.processes.command_line import Labkit, command_line
from helpers.studies.comparisons import measurement

from labkit.harness import Measurement
from labkit.harness.results import save_lines


@pytest.fixture
def labkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    monkeypatch.chdir(tmp_path)
    fast, slow = measurement("fused"), measurement("fused")
    save_lines(tmp_path / "fast.jsonl", [fast])
    save_lines(tmp_path / "slow.jsonl", [slowed(slow)])
    return command_line(monkeypatch, capsys)


def slowed(side: Measurement) -> Measurement:
    runs = (run.model_copy(update={"decode_ms": tuple(2 * step for step in run.decode_ms)}) for run in side.runs)
    return side.model_copy(update={"runs": tuple(runs)})


def test_the_exit_code_says_whether_something_became_slower(labkit: Labkit) -> None:
    code, output, _ = labkit("diff", "fast.jsonl", "slow.jsonl")
    assert code == 1
    assert "1 SLOWER" in output
    assert labkit("diff", "slow.jsonl", "fast.jsonl")[0] == 0
    assert labkit("diff", "fast.jsonl", "fast.jsonl")[0] == 0
    assert labkit("diff", "fast.jsonl", "slow.jsonl", "--tolerance", "2")[0] == 0
    assert labkit("diff", "fast.jsonl", "slow.jsonl", "--metric", "ttft")[0] == 0


def test_json_is_one_object(labkit: Labkit) -> None:
    code, output, _ = labkit("diff", "fast.jsonl", "slow.jsonl", "--json")
    result = json.loads(output)
    assert code == 1
    assert result["verdicts"] == {"SLOWER": 1, "UNDECIDED": 0, "SAME": 0, "FASTER": 0}
    assert result["cases"][0]["ratio"] == pytest.approx(0.5)


def test_what_is_not_there_is_said_in_a_line(labkit: Labkit) -> None:
    code, output, errors = labkit("diff", "fast.jsonl", "none.jsonl")
    assert (code, output) == (2, "")
    assert "got none.jsonl, which does not exist" in errors
    assert "Traceback" not in errors
