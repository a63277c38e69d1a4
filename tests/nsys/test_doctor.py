"""Each fault of a machine is found and reported in one line, with its repair in one line."""

import json
import multiprocessing
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import nvtx
import pytest
from helpers.nsys.doctors import by_name
from helpers.nsys.installations import fake_nsys, without_host_folder
from helpers.nsys.nsight import exported, loses_plain_ranges
from helpers.sweeps import sweep
from rich.console import Console
from typer.testing import CliRunner

from labkit.cli.app import app
from labkit.nsys import agent, tool
from labkit.nsys.doctor import examination as doctor
from labkit.nsys.doctor import machine_checks, profiler_checks
from labkit.nsys.doctor.check import DoctorCheck, Status
from labkit.nsys.doctor.examination import as_dict, doctor_table, examine, worst
from labkit.nsys.doctor.machine_checks import Inventory
from labkit.nsys.tool import Nsys


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without nsys, whose software is not examined."""
    monkeypatch.delenv("LABKIT_NSYS", raising=False)
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    monkeypatch.setattr(tool, "USUAL_PLACES", ())
    monkeypatch.setattr(machine_checks, "take_inventory", lambda: Inventory({}))


@sweep
def test_this_machine_is_examined_without_loading_torch() -> None:
    program = (
        "import json, sys; from labkit.nsys.doctor.examination import *; "
        "print(json.dumps(as_dict(examine(sampling=True))))"
    )
    process = subprocess.run(
        [sys.executable, "-P", "-c", f"{program}; assert 'torch' not in sys.modules"],
        capture_output=True,
        text=True,
        check=True,
    )
    checks = {check["name"]: check for check in json.loads(process.stdout)["checks"]}
    assert {"nsys", "temporary folder", "worker processes", "CPU sampling", "GPU", "driver and CUDA"} <= checks.keys()
    assert {
        "PyTorch",
        "Triton",
        "CPU kernels",
        "memory",
        "OpenMP",
        "threads",
        "CPU frequency",
        "huge pages",
    } <= checks.keys()
    assert checks["PyTorch"]["status"] == checks["CPU kernels"]["status"] == checks["OpenMP"]["status"] == "OK"
    for check in checks.values():
        assert "\n" not in check["finding"]
        assert check["finding"]
        assert (check["repair"] is None) == (check["status"] == "OK") or "looked at" in check["finding"]
        assert "\n" not in (check["repair"] or "")


@pytest.mark.usefixtures("bare")
def test_without_nsys_torch_profiler_stands_in() -> None:
    check = by_name(examine())["nsys"]
    assert check.status == Status.WARN
    assert "torch.profiler" in check.finding
    assert "non-free" in str(check.repair)


@pytest.mark.usefixtures("bare")
def test_a_wrong_name_in_the_environment_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_NSYS", "/nowhere/nsys")
    check = by_name(examine())["nsys"]
    assert (check.status, check.repair) == (Status.FAIL, "unset LABKIT_NSYS")
    assert "/nowhere/nsys" in check.finding


@pytest.mark.usefixtures("bare")
def test_a_check_that_fails_itself_is_a_warning_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> DoctorCheck:
        raise OSError("no such device")

    before = [check.name for check in examine()]
    monkeypatch.setattr(machine_checks, "governor", fails)
    monkeypatch.setattr(profiler_checks, "temporary_folder", fails)
    after = examine()
    assert [check.name for check in after] == before
    for name in ("CPU frequency", "temporary folder"):
        assert by_name(after)[name] == DoctorCheck(name, Status.WARN, "could not be checked: no such device")


def test_ranges_arrive_with_the_installed_versions(real: Nsys) -> None:
    probe = profiler_checks.capture_probe(real)
    assert probe.failure is None
    assert profiler_checks.stage_ranges(probe).status == Status.OK
    assert profiler_checks.plain_ranges(probe).status == (Status.FAIL if loses_plain_ranges(real) else Status.OK)


def test_ranges_that_nvtx_drops_are_missed_but_those_of_stages_are_not(
    real: Nsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake nvtx returns a domain that does nothing, as nvtx from 0.2.12 on does under these versions of nsys."""
    dropping = tmp_path / "nvtx" / "__init__.py"
    dropping.parent.mkdir()
    dropping.write_text(
        f"__path__.append({str(Path(nvtx.__file__).parent)!r})\n"
        "class DummyDomain: pass\n"
        "def get_domain(name=None): return DummyDomain()\n"
        "def push_range(*args, **kwargs): pass\n"
        "def pop_range(*args, **kwargs): pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probe = profiler_checks.capture_probe(real)
    assert probe.failure is None
    check = profiler_checks.plain_ranges(probe)
    assert check.status == Status.FAIL
    assert str(check.repair).endswith("-m pip install nvtx==0.2.11")
    assert profiler_checks.stage_ranges(probe).status == Status.OK


def test_nvtx_that_is_switched_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTX_DISABLE", "1")
    check = profiler_checks.plain_ranges(profiler_checks.Probe(frozenset()))
    assert (check.status, check.repair) == (Status.FAIL, "unset NVTX_DISABLE")


def test_a_missing_importer_fails_and_nothing_is_captured(
    real: Nsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_NSYS", str(without_host_folder(real, tmp_path / "a" / "b" / "c")))
    monkeypatch.setattr(machine_checks, "take_inventory", lambda: Inventory({}))
    checks = by_name(examine())
    assert checks["importer"].status == Status.FAIL
    assert checks["importer"].repair
    assert "test capture" not in checks


def test_a_capture_that_fails_says_what_nsys_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_nsys(tmp_path, profile="Agent launcher failed.\nGoodbye.")
    check = profiler_checks.capture(profiler_checks.capture_probe(Nsys(program, (2024,), "2024", None)))
    assert check.status == Status.FAIL
    assert check.finding == "gave no report: exit code 0: Agent launcher failed."


def test_the_capture_is_tried_again_where_nsys_lost_its_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "OTHERS_S", 0.0)  # other tests may capture meanwhile
    program = tmp_path / "nsys"
    program.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs\necho 'Agent launcher failed.'\nexit 1\n")
    program.chmod(0o755)
    profiler_checks.capture_probe(Nsys(program, (2024,), "2024", None))
    assert (tmp_path / "runs").read_text() == "run\n" * agent.ATTEMPTS


def test_a_damaged_report_is_a_warning(real: Nsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(nsys: Nsys) -> profiler_checks.Probe:
        raise sqlite3.DatabaseError("file is not a database")

    monkeypatch.setattr(profiler_checks, "capture_probe", damaged)
    monkeypatch.setattr(machine_checks, "take_inventory", lambda: Inventory({}))
    monkeypatch.setattr(doctor, "find_nsys", lambda: real)
    assert by_name(examine())["test capture"].finding == "could not be checked: file is not a database"


@pytest.mark.parametrize(
    ("level", "user", "nsys_status", "status", "repair"),
    [
        (2, 1000, "", Status.OK, None),
        (3, 0, "", Status.OK, None),
        (3, 1000, "", Status.FAIL, "sudo sysctl kernel.perf_event_paranoid=2"),
        (3, 0, "(process-tree): OK", Status.OK, None),
        (4, 1000, "(process-tree): Fail", Status.FAIL, "sudo sysctl kernel.perf_event_paranoid=2"),
        (1, 0, "perf_event_open syscall available: Fail\n(process-tree): Fail", Status.FAIL, "docker run"),
    ],
)
def test_sampling_needs_a_system_that_allows_it(
    level: int,
    user: int,
    nsys_status: str,
    status: Status,
    repair: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """nsys's own verdict counts if it gives one."""
    (tmp_path / "paranoia").write_text(f"{level}\n")
    monkeypatch.setattr(profiler_checks, "PARANOIA", tmp_path / "paranoia")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    nsys = Nsys(fake_nsys(tmp_path, status=nsys_status), (2024,), "2024", None) if nsys_status else None
    check = profiler_checks.sampling(nsys)
    assert check.status == status
    assert str(level) in check.finding
    assert (repair or "None") in str(check.repair)


@pytest.mark.parametrize(("method", "status"), [("fork", "WARN"), ("forkserver", "WARN"), ("spawn", "OK")])
def test_workers_that_lose_their_ranges_are_announced(
    method: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: None)
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: [method, "other"])
    assert profiler_checks.worker_start().status == status


def test_asking_how_workers_start_leaves_the_choice_open() -> None:
    program = (
        "import multiprocessing; from labkit.nsys.doctor.profiler_checks import worker_start as check; check(); "
        "multiprocessing.set_start_method('spawn'); assert check().status == 'OK'"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)


@pytest.mark.parametrize(("method", "arrives"), [("fork", False), ("forkserver", False), ("spawn", True)])
def test_the_check_of_workers_is_right(real: Nsys, method: str, arrives: bool, tmp_path: Path) -> None:
    if loses_plain_ranges(real):
        pytest.skip("the installed nvtx drops the ranges of every process under this nsys")
    (tmp_path / "workers.py").write_text(
        "import multiprocessing, nvtx\n"
        "def work(name):\n"
        "    nvtx.push_range(name)\n"
        "    nvtx.pop_range()\n"
        "if __name__ == '__main__':\n"
        f"    worker = multiprocessing.get_context({method!r}).Process(target=work, args=('worker',))\n"
        "    worker.start()\n"
        "    worker.join()\n"
        "    work('parent')\n"
    )
    export = exported(real, [sys.executable, str(tmp_path / "workers.py")], tmp_path)
    with closing(sqlite3.connect(export)) as database:
        names = {name for (name,) in database.execute("select value from StringIds join NVTX_EVENTS on id = textId")}
    assert ("parent" in names, "worker" in names) == (True, arrives)


def test_the_worst_counts_and_texts_are_shown_as_they_are() -> None:
    checks = [
        DoctorCheck("a", Status.OK, "fine"),
        DoctorCheck("b", Status.FAIL, "the [red] one", "set [blue]"),
        DoctorCheck("c", Status.WARN, "hm"),
    ]
    assert (worst([]), worst(checks[:1]), worst(checks[::2]), worst(checks)) == ("OK", "OK", "WARN", "FAIL")
    assert json.loads(json.dumps(as_dict(checks)))["checks"][1]["repair"] == "set [blue]"
    for repairs in (True, False):
        console = Console(width=100, record=True)
        with console.capture() as shown:
            console.print(doctor_table(checks, repairs=repairs))
        assert "the [red] one" in shown.get()
        assert ("set [blue]" in shown.get()) is repairs


@pytest.mark.parametrize(("status", "code"), [(Status.OK, 0), (Status.WARN, 0), (Status.FAIL, 1)])
def test_the_command_fails_on_a_failed_check(status: Status, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda **options: [DoctorCheck("a", status, "looked", "repair it")])
    table, as_json = (CliRunner().invoke(app, ["doctor", *flags]) for flags in ([], ["--json"]))
    assert (table.exit_code, as_json.exit_code) == (code, code)
    assert "looked" in table.stdout
    assert "repair it" in table.stdout
    assert json.loads(as_json.stdout) == as_dict([DoctorCheck("a", status, "looked", "repair it")])
