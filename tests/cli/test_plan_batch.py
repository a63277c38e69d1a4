"""`labkit plan-batch`: tables or one JSON object, a record, and refused requests."""

import json
from pathlib import Path

import pytest
from helpers.processes.command_line import Labkit, command_line
from helpers.studies.streaming_plans import plan, point
from rich.console import Console

from labkit.cli import plan_batch as plan_cli
from labkit.harness import load_records
from labkit.harness.streaming import measured

RATES_OF_ANOTHER_MACHINE = ("--disk-gb-s", "2", "--gflops", "1000")
LARGE = ("plan-batch", "llama-2-70b", "--memory-gb", "16", "--precision", "int4-64", *RATES_OF_ANOTHER_MACHINE)


@pytest.fixture
def labkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    """Runs a command line in the test's folder: (exit code, stdout, stderr)."""
    monkeypatch.setattr(plan_cli, "out", Console(width=120))
    monkeypatch.chdir(tmp_path)
    return command_line(monkeypatch, capsys)


def test_a_plan_for_another_machine_is_shown_and_kept(labkit: Labkit, tmp_path: Path) -> None:
    code, out, _ = labkit(*LARGE)
    assert code == 0
    assert "The largest batch that fits is" in out
    assert "Memory for layers, or for sequences; predicted" in out
    assert "measured" not in out
    (record,) = load_records(tmp_path / "runs")
    assert record.kind == "streaming_plan"


def test_json_is_one_object_that_tells_figures_apart(labkit: Labkit) -> None:
    code, out, _ = labkit(*LARGE, "--json")
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert {row["figures"] for row in result["rows"]} == {"predicted", "trade"}
    assert result["free_rows"] == pytest.approx(1000 * 0.5625 / (2 * 2), rel=0.01)


def test_what_was_measured_has_a_table_of_its_own(
    labkit: Labkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurement itself is tested in tests/harness/streaming."""
    record = plan(points=(point(1), point(2)))
    monkeypatch.setattr(measured, "measured_plan", lambda *args, **kwargs: (record, ()))
    sizes = ("--memory-gb", "0.2", "--prompt", "4", "--new", "3", "--path", str(tmp_path))
    code, out, _ = labkit("plan-batch", "tiny-llama", *sizes, "--measure")
    assert code == 0
    assert "; measured" in out
    assert "Measured: the most tokens/s at batch 2" in out
    assert load_records(tmp_path / "runs") == [record]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--measure",), "got --measure with the rates of another machine"),
        (("--rounds", "3"), "got --rounds 3 without --measure"),
        (("--memory-gb", "1"), "the least that works with 3 slots is"),
        (("--precision", "int4-96"), "got groups of 96 inputs"),
        (("--output", "/proc/nowhere"), "/proc/nowhere"),
    ],
)
def test_what_cannot_be_planned_is_one_line(arguments: tuple[str, ...], message: str, labkit: Labkit) -> None:
    code, out, err = labkit(*LARGE, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
