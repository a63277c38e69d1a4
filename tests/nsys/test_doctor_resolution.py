"""The doctor shows the resolutions that were measured on this machine, and measures one on request."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from labkit.cli.app import app
from labkit.harness.turns import resolution as measurement
from labkit.nsys.doctor import examination as doctor
from labkit.nsys.doctor.check import Status
from labkit.nsys.doctor.machine_checks import UNKNOWN, resolution
from labkit.statistics import kept_records
from labkit.statistics.kept_records import Machine
from labkit.statistics.kept_resolutions import KEPT, KeptResolution, keep_resolution, kept_resolutions

MEASURED = KeptResolution(
    machine=Machine.here(), threads=2, model="gpt2", dtype="bfloat16", weight_mb=249.0, scatter=0.02, bias=0.0,
    epoch_s=3.0, epochs=20, measured=date(2026, 11, 27),
)  # fmt: skip
LARGE = MEASURED.model_copy(update={"model": "large", "weight_mb": 5000.0, "epoch_s": 15.0})
SENTENCE = "this machine tells 0.9% apart in 60 s, for models around 249 MB (gpt2 bfloat16) on 2 threads, 2026-11-27"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_records, "cache_root", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of the measurement, which is replaced."""
    arguments: dict[str, Any] = {}

    def measure_resolution(**given: Any) -> KeptResolution:
        del given["progress"]
        arguments.update(given)
        return MEASURED

    monkeypatch.setattr(measurement, "measure_resolution", measure_resolution)
    monkeypatch.setattr(doctor, "examine", lambda **options: [resolution()])
    return arguments


def labkit(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200"})


def words_of(result: Result) -> str:
    """The text of a table's cells, whatever its width."""
    cells = [line.split("│") for line in result.stdout.splitlines() if "│" in line]
    return " ".join(" ".join(part for row in cells for part in row[3:4]).split())


@pytest.mark.usefixtures("cache")
def test_without_a_measurement_the_doctor_says_how_to_make_one() -> None:
    check = resolution()
    assert (check.status, check.finding, check.figures) == (Status.OK, UNKNOWN, ())
    assert "labkit doctor --resolution" in UNKNOWN


@pytest.mark.usefixtures("cache")
def test_each_kept_figure_is_shown() -> None:
    for kept in (LARGE, MEASURED):
        keep_resolution(kept)
    check = resolution()
    assert check.finding.startswith(f"{SENTENCE}; this machine tells 3.2% apart in 60 s, for models around 5,000 MB")
    assert [figure["model"] for figure in check.figures] == ["gpt2", "large"]
    assert check.figures[0]["difference"] == pytest.approx(0.0094, abs=1e-4)
    (shown,) = doctor.as_dict([check])["checks"]
    assert json.loads(json.dumps(shown))["figures"] == list(check.figures)


def test_the_whole_examination_has_the_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.machine, "take_inventory", lambda: doctor.machine.Inventory({}))
    keep_resolution(MEASURED)
    (check,) = [check for check in doctor.examine(probe=False) if check.name == "resolution"]
    assert check.finding == SENTENCE


def test_a_measurement_is_shown_and_kept(asked: dict[str, Any]) -> None:
    assert UNKNOWN in words_of(labkit())
    measured = labkit("--resolution")
    assert measured.exit_code == 0
    assert SENTENCE in words_of(measured)
    assert asked == {}
    assert kept_resolutions() == [MEASURED]
    assert SENTENCE in words_of(labkit())
    as_json = labkit("--resolution", "--json", "--model", "llama", "--dtype", "float32", "--threads", "1")
    assert json.loads(as_json.stdout)["checks"][0]["figures"] == [MEASURED.as_dict()]
    assert asked == {"model": "llama", "dtype": "float32", "threads": 1}


@pytest.mark.parametrize("option", [("--model", "gpt2"), ("--dtype", "float32"), ("--threads", "1")])
def test_options_of_a_measurement_need_one(asked: dict[str, Any], option: tuple[str, str]) -> None:
    refused = labkit(*option)
    assert refused.exit_code != 0
    assert str(refused.exception).startswith(f"got {option[0]}, which belongs to a measurement: add --resolution")
    assert asked == {}


def test_a_place_that_cannot_be_written_is_told_before_the_minute(asked: dict[str, Any], cache: Path) -> None:
    (cache / KEPT).mkdir()
    refused = labkit("--resolution")
    assert "which is a folder" in str(refused.exception)
    assert asked == {}


def test_an_interrupt_keeps_nothing(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**given: Any) -> KeptResolution:
        raise KeyboardInterrupt

    monkeypatch.setattr(measurement, "measure_resolution", interrupted)
    assert labkit("--resolution").exit_code != 0
    assert kept_resolutions() == []
