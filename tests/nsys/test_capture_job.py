"""Kept files and records of captures. The reports are made up, so that no profiler is needed."""

import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.traces.nsys_databases import random_database

from labkit.nsys.capture import job as job_module
from labkit.nsys.capture.command import Window
from labkit.nsys.capture.job import CaptureJob, Workplace, environment_of
from labkit.nsys.capture.profile import profile
from labkit.nsys.capture.record import record_beside
from labkit.nsys.process import Ended
from labkit.nsys.tool import Nsys
from labkit.nsys.trace import TraceError
from labkit.system.errors import RunError

TOKEN = "hf_planted0123456789"
SUCCESS, FAILED, STOPPED, LATE = (
    Ended(code, 1.0, (), interrupted, late)
    for code, interrupted, late in ((0, False, False), (5, False, False), (0, True, False), (0, False, True))
)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CaptureJob:
    """A job that captures two ranks with nsys; the machine is not examined."""
    place = Workplace(tmp_path / "place", tmp_path / "scratch")
    for folder in (place.folder, place.scratch):
        folder.mkdir()
    monkeypatch.setattr(job_module, "environment_of", lambda variables: {"cores": 2})
    return CaptureJob(
        command=("python", "x.py"),
        ranks="one",
        name="run",
        output=tmp_path,
        place=place,
        window=Window(),
        nsys=Nsys(Path("nsys"), (2024, 1), "2024.1", None),
        environment={"API_TOKEN": TOKEN},
        case={},
        keep_raw=False,
    )


def write_report(job: CaptureJob, rank: int) -> Path:
    return random_database(job.place.folder / f"report-r{rank}.sqlite", rank, "2022.4")


def write_half_report(job: CaptureJob, rank: int) -> None:
    content = write_report(job, rank).read_bytes()
    (job.place.folder / f"report-r{rank}.sqlite").write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("ended", [FAILED, STOPPED, LATE], ids=["failed", "stopped", "late"])
def test_half_a_report_of_a_run_that_did_not_end_well_is_left_out(ended: Ended, job: CaptureJob) -> None:
    write_report(job, 0)
    write_half_report(job, 1)
    capture = job.keep(job.collect(ended), ended, None)
    assert capture is not None
    assert [file.name for file in capture.files] == ["run-r0.sqlite"]
    assert capture.record.remarks[-1] == "left out, because the run ended before they were whole: run-r1.sqlite"
    (job.place.folder / "report-r0.sqlite").unlink()
    assert job.keep(job.collect(ended), ended, None) is None


def test_half_a_report_of_a_run_that_ended_well_is_an_error(job: CaptureJob) -> None:
    write_half_report(job, 0)
    with pytest.raises(TraceError, match="damaged"):
        job.collect(SUCCESS)


def test_texts_in_the_case_are_shared_without_secrets_however_deep_they_are(job: CaptureJob) -> None:
    job.case.update(model="/home/ada/gpt2", options={"words": ["as", f"token {TOKEN}"], "count": 3})
    write_report(job, 0)
    capture = job.keep(job.collect(SUCCESS), SUCCESS, None)
    assert capture is not None
    assert capture.record.case == {"model": "gpt2", "options": {"words": ["as", "token <redacted>"], "count": 3}}


def test_the_record_says_what_was_redacted(job: CaptureJob) -> None:
    """By the source of each private value: the number of texts that held it. The command counts once."""
    job.environment.update(USER="ada", NOTE="/home/ada/notes", HOSTNAME="unused")
    job.case.update(model="gpt2 of ada", texts=[f"token {TOKEN}", f"{TOKEN} of ada"], folder="in /home/ada/notes")
    job = replace(job, command=("python", "x.py", "--auth=tiger-5x9"))
    write_report(job, 0)
    capture = job.keep(job.collect(SUCCESS), SUCCESS, None)
    assert capture is not None
    assert capture.record.redacted == {"API_TOKEN": 2, "NOTE": 1, "USER": 2, "the command": 1}
    assert capture.record.command == ("python", "x.py", "--auth=<redacted>")
    assert record_beside(capture.files[0]) == capture.record


def test_a_kept_raw_report_is_written_as_other_outputs_are(job: CaptureJob, tmp_path: Path) -> None:
    """A link and the mode of an earlier report stay, and a new one has the mode that the umask leaves."""
    job = replace(job, keep_raw=True)
    for rank in range(3):
        raw = write_report(job, rank).with_suffix(".nsys-rep")
        raw.write_text(f"raw {rank}")
        raw.chmod(0o777)
    (elsewhere := tmp_path / "elsewhere.nsys-rep").touch(0o600)
    (tmp_path / "run-r0.nsys-rep").symlink_to(elsewhere)
    (earlier := tmp_path / "run-r1.nsys-rep").touch()
    earlier.chmod(0o604)
    before = os.umask(0o027)
    try:
        job.keep(job.collect(SUCCESS), SUCCESS, None)
    finally:
        os.umask(before)
    kept = [tmp_path / f"run-r{rank}.nsys-rep" for rank in range(3)]
    assert [file.read_text() for file in kept] == ["raw 0", "raw 1", "raw 2"]
    assert [file.is_symlink() for file in kept] == [True, False, False]
    assert [stat.S_IMODE(file.stat().st_mode) for file in kept] == [0o600, 0o604, 0o640]
    assert not list(job.place.folder.glob("*.nsys-rep"))


def test_a_case_that_no_record_could_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got case\['place'\] = .*expected plain data, as JSON has it"):
        profile(["python", "x.py"], output=tmp_path / "out", case={"model": "gpt2", "place": tmp_path})
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_cannot_be_described_is_remarked(job: CaptureJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(variables: Mapping[str, str]) -> dict[str, Any]:
        raise RunError(f"the machine of this run is not known: {variables['API_TOKEN']}")

    monkeypatch.setattr(job_module, "environment_of", fails)
    write_report(job, 0)
    capture = job.keep(job.collect(SUCCESS), SUCCESS, None)
    assert capture is not None
    assert capture.record.environment is None
    assert capture.record.remarks == ("the machine of this run is not known: <redacted>",)


@pytest.mark.parametrize(("cores", "trusted"), [(1.5, False), (0.04, True), (None, True)])
def test_the_record_keeps_the_load_and_grades_it(cores: float | None, trusted: bool, job: CaptureJob) -> None:
    write_report(job, 0)
    ended = replace(SUCCESS, taken_cores=cores)
    capture = job.keep(job.collect(ended), ended, None)
    assert capture is not None
    record = record_beside(capture.files[0])
    assert record == capture.record
    assert record.taken_cores == cores
    assert record.trust.trustworthy == trusted
    assert trusted or record.trust.sentence == (
        "not trustworthy: other programs used 1.5 of the processors that it was measured on. To mend it: close other "
        "programs, and capture again."
    )


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake python that prints its variable KIND and its number of threads."""
    path = tmp_path / "python"
    path.write_text('#!/bin/sh\necho "{\\"kind\\": \\"$KIND\\", \\"threads\\": $4}"\n')
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    return path


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("value", "threads"), [("3", 3), ("4,2", 4), (" 5 ", 5)])
def test_the_machine_is_described_as_the_command_finds_it(value: str, threads: int) -> None:
    for kind in ("first", "second"):
        assert environment_of({"OMP_NUM_THREADS": value, "KIND": kind}) == {"kind": kind, "threads": threads}


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("variables", [{}, {"OMP_NUM_THREADS": ""}, {"OMP_NUM_THREADS": "many"}])
def test_without_a_number_of_threads_it_is_that_of_the_processors(variables: dict[str, str]) -> None:
    assert environment_of(variables)["threads"] >= 1


def test_a_description_that_fails_says_why(interpreter: Path) -> None:
    interpreter.write_text("#!/bin/sh\necho 'no module torch' >&2\nexit 1\n")
    with pytest.raises(RunError, match="the machine of this run is not known: no module torch"):
        environment_of({})
