"""Each fault of a machine is found, says so in one line, and has its repair in one line."""

import json
import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nvtx
import pytest
from installations import fake_nsys, nsys_here, without_host_folder
from rich.console import Console
from typer.testing import CliRunner

from labkit.cli.main import app
from labkit.nsys import tool
from labkit.nsys.doctor import examination as doctor
from labkit.nsys.doctor import machine_checks, profiler_checks
from labkit.nsys.doctor.check import DoctorCheck, Status
from labkit.nsys.doctor.examination import as_dict, doctor_table, examine, worst
from labkit.nsys.doctor.machine_checks import Inventory
from labkit.nsys.tool import Nsys

WITHOUT_GPU: dict[str, Any] = {"cuda": [12, 2], "gpus": [], "cu_init": 100}
WITH_GPU: dict[str, Any] = {"cuda": [12, 4], "gpus": ["NVIDIA H100"], "cu_init": 0}
TORCH: dict[str, Any] = {"version": "2.13.0", "cuda": "12.6", "gpu": True, "threads": 2}
CPU_TORCH: dict[str, Any] = {"version": "2.13.0+cpu", "cuda": None, "gpu": False, "threads": 2}
GIGABYTE = 1 << 30


@pytest.fixture
def real() -> Nsys:
    return nsys_here()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without nsys, whose software was not looked at."""
    monkeypatch.delenv("LABKIT_NSYS", raising=False)
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    monkeypatch.setattr(tool, "USUAL_PLACES", ())
    monkeypatch.setattr(machine_checks, "take_inventory", lambda: Inventory({}))


def by_name(checks: list[DoctorCheck]) -> dict[str, DoctorCheck]:
    found = {check.name: check for check in checks}
    assert len(found) == len(checks)
    return found


def inventory(**facts: Mapping[str, Any]) -> Inventory:
    return Inventory({"driver": WITHOUT_GPU, "torch": CPU_TORCH, **facts})


def test_this_machine_is_examined_without_loading_torch() -> None:
    program = (
        "import json, sys; from labkit.nsys.doctor.examination import *; "
        "print(json.dumps(as_dict(examine(sampling=True))))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{program}; assert 'torch' not in sys.modules"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert {"nsys", "temporary folder", "worker processes", "CPU sampling", "GPU", "driver and CUDA"} <= found.keys()
    assert {"PyTorch", "Triton", "CPU kernels", "OpenMP", "threads", "CPU frequency", "huge pages"} <= found.keys()
    assert found["PyTorch"]["status"] == found["CPU kernels"]["status"] == found["OpenMP"]["status"] == "OK"
    for check in found.values():
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
        assert by_name(after)[name] == DoctorCheck(name, Status.WARN, "could not be looked at: no such device")


def test_ranges_arrive_with_the_installed_versions(real: Nsys) -> None:
    probe = profiler_checks.capture_probe(real)
    assert probe.failure is None
    assert profiler_checks.stage_ranges(probe).status == Status.OK
    assert profiler_checks.plain_ranges(probe).status == Status.OK


def test_ranges_that_nvtx_drops_are_missed_but_those_of_stages_are_not(
    real: Nsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An nvtx that, as from 0.2.12 on under these versions of nsys, hands out a domain that does nothing."""
    dropping = tmp_path / "nvtx" / "__init__.py"
    dropping.parent.mkdir()
    dropping.write_text(
        f"__path__.append({str(Path(nvtx.__file__).parent)!r})\n"
        "class DummyDomain: pass\n"
        "def get_domain(name=None): return DummyDomain()\n"
        "def push_range(*given, **named): pass\n"
        "def pop_range(*given, **named): pass\n"
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
    found = by_name(examine())
    assert found["importer"].status == Status.FAIL
    assert found["importer"].repair
    assert "test capture" not in found


def test_a_capture_that_fails_says_what_nsys_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_nsys(tmp_path, profile="Agent launcher failed.\nGoodbye.")
    check = profiler_checks.capture(profiler_checks.capture_probe(Nsys(program, (2024,), "2024", None)))
    assert check.status == Status.FAIL
    assert check.finding == "gave no report: exit code 0: Agent launcher failed."


def test_a_damaged_report_is_a_warning(real: Nsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(nsys: Nsys) -> profiler_checks.Probe:
        raise sqlite3.DatabaseError("file is not a database")

    monkeypatch.setattr(profiler_checks, "capture_probe", damaged)
    monkeypatch.setattr(machine_checks, "take_inventory", lambda: Inventory({}))
    monkeypatch.setattr(doctor, "find_nsys", lambda: real)
    assert by_name(examine())["test capture"].finding == "could not be looked at: file is not a database"


@pytest.mark.parametrize(
    ("level", "user", "said", "status", "repair"),
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
    said: str,
    status: Status,
    repair: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """nsys's own verdict counts where it gives one."""
    (tmp_path / "paranoia").write_text(f"{level}\n")
    monkeypatch.setattr(profiler_checks, "PARANOIA", tmp_path / "paranoia")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    nsys = Nsys(fake_nsys(tmp_path, status=said), (2024,), "2024", None) if said else None
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
def test_what_is_said_of_workers_is_so(real: Nsys, method: str, arrives: bool, tmp_path: Path) -> None:
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
    traced = ("--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--export=sqlite", f"--output={tmp_path / 'out'}")
    command = [str(real.path), "profile", *traced, sys.executable, str(tmp_path / "workers.py")]
    subprocess.run(command, capture_output=True, check=True)
    with sqlite3.connect(tmp_path / "out.sqlite") as database:
        names = {name for (name,) in database.execute("select value from StringIds join NVTX_EVENTS on id = textId")}
    assert ("parent" in names, "worker" in names) == (True, arrives)


@pytest.mark.parametrize(
    ("kind", "free", "status"),
    [
        ("ext4", 80 * GIGABYTE, Status.OK),
        ("ext4", GIGABYTE, Status.WARN),
        ("ext4", 100 << 20, Status.FAIL),
        ("tmpfs", 80 * GIGABYTE, Status.WARN),
        ("tmpfs", 1 << 20, Status.FAIL),
    ],
)
def test_a_small_disk_or_one_in_memory_is_no_place_for_captures(
    kind: str, free: int, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(profiler_checks, "file_system", lambda folder, mounts: kind if folder == tmp_path else "ext4")
    usage = {tmp_path: SimpleNamespace(free=free)}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage.get(folder, SimpleNamespace(free=9 * GIGABYTE)))
    check = profiler_checks.temporary_folder()
    assert check.status == status
    assert str(check.repair) == ("None" if status == Status.OK else "export TMPDIR=/tmp")


def test_a_temporary_folder_that_is_not_there_fails_and_nothing_is_captured(
    real: Nsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    monkeypatch.setattr(machine_checks, "take_inventory", lambda: Inventory({}))
    monkeypatch.setattr(doctor, "find_nsys", lambda: real)
    found = by_name(examine())
    assert found["temporary folder"].status == Status.FAIL
    assert "test capture" not in found


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = f"/dev/sda / ext4 rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n/dev/b {tmp_path}/with\\040space xfs rw 0 0\n"
    inner = tmp_path / "with space" / "deep"
    assert [profiler_checks.file_system(folder, mounts) for folder in (Path("/"), tmp_path, inner)] == [
        "ext4",
        "tmpfs",
        "xfs",
    ]
    assert profiler_checks.file_system(Path(f"{tmp_path}-beside"), mounts) == "ext4"


@pytest.mark.parametrize(
    ("driver", "torch", "cupti", "gpu", "fit"),
    [
        (WITHOUT_GPU, CPU_TORCH, None, Status.WARN, Status.OK),
        ({"error": "libcuda.so.1: cannot open"}, CPU_TORCH, None, Status.WARN, Status.OK),
        (WITH_GPU | {"gpus": [], "cu_init": 803}, TORCH, None, Status.WARN, Status.FAIL),
        (WITH_GPU, TORCH, None, Status.OK, Status.OK),
        (WITH_GPU, TORCH, "12.4", Status.OK, Status.OK),
        (WITH_GPU, TORCH, "11.8", Status.OK, Status.WARN),
        (WITH_GPU, TORCH | {"cuda": "13.0"}, "13.0", Status.OK, Status.FAIL),
        (WITH_GPU, TORCH | {"gpu": False}, "12.4", Status.OK, Status.FAIL),
        (WITH_GPU, CPU_TORCH, "12.4", Status.OK, Status.FAIL),
    ],
)
def test_driver_and_cuda_have_to_fit(
    driver: dict[str, Any],
    torch: dict[str, Any],
    cupti: str | None,
    gpu: Status,
    fit: Status,
    tmp_path: Path,
) -> None:
    nsys = Nsys(fake_nsys(tmp_path), (2024,), "2024", None)
    for version in ("9.2", cupti) if cupti else ():
        (tmp_path / f"libcupti.so.{version}").touch()
    looked_at = inventory(driver=driver, torch=torch)
    checks = [machine_checks.gpu(looked_at), machine_checks.driver(looked_at, nsys)]
    assert [check.status for check in checks] == [gpu, fit]
    assert [check.repair is None for check in checks] == [status == Status.OK for status in (gpu, fit)]


@pytest.mark.parametrize(
    ("variables", "allowed", "quota", "used", "status", "repair"),
    [
        ({}, 8, None, 8, Status.OK, None),
        ({}, 8, None, 4, Status.OK, None),
        ({}, 8, 2.0, 8, Status.WARN, "export OMP_NUM_THREADS=2"),
        ({"OMP_NUM_THREADS": "2"}, 8, 2.0, 2, Status.OK, None),
        ({"OMP_NUM_THREADS": "1"}, 8, None, 1, Status.WARN, "unset OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "16"}, 8, None, 16, Status.WARN, "export OMP_NUM_THREADS=4"),
    ],
)
def test_threads_match_the_cores(
    variables: dict[str, str],
    allowed: int,
    quota: float | None,
    used: int,
    status: Status,
    repair: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in machine_checks.THREAD_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(allowed))
    monkeypatch.setattr(machine_checks.psutil, "cpu_count", lambda logical: 4)
    monkeypatch.setattr(machine_checks, "cpu_quota", lambda folder: quota)
    check = machine_checks.threads(inventory(torch=CPU_TORCH | {"threads": used}))
    assert (check.status, check.repair) == (status, repair)
    assert all(f"{name}={value}" in check.finding for name, value in variables.items())


def test_the_quota_of_both_generations_of_control_groups(tmp_path: Path) -> None:
    assert machine_checks.cpu_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for text, quota in (("-1\n", None), ("150000\n", 1.5)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(text)
        assert machine_checks.cpu_quota(tmp_path) == quota
    for text, quota in (("max 100000\n", None), ("400000 100000\n", 4.0)):
        (tmp_path / "cpu.max").write_text(text)
        assert machine_checks.cpu_quota(tmp_path) == quota


def test_two_openmp_runtimes_in_one_process_are_announced() -> None:
    one, two = ["/torch/lib/libgomp.so.1"], ["/torch/lib/libgomp-a34b3233.so.1", "/usr/lib/libomp.so.5"]
    assert machine_checks.openmp(inventory(openmp={"libraries": one})).finding.startswith("GNU")
    check = machine_checks.openmp(inventory(openmp={"libraries": two}))
    assert check.status == Status.WARN
    assert "GNU (/torch/lib/libgomp-a34b3233.so.1), LLVM (/usr/lib/libomp.so.5)" in check.finding


def test_software_that_cannot_be_loaded_fails_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"error": "libfoo.so: cannot open shared object file"}
    assert machine_checks.torch(inventory(torch=broken)).status == Status.FAIL
    assert machine_checks.triton(inventory(triton=broken)).status == Status.WARN
    assert machine_checks.triton(inventory(triton=broken, driver=WITH_GPU)).status == Status.FAIL
    check = machine_checks.compiler(inventory(kernels={"error": "no g++ or clang++ on the PATH"}))
    assert check.status == Status.FAIL
    assert "apt-get install g++" in str(check.repair)
    monkeypatch.setenv("CXX", "/nope")
    check = machine_checks.compiler(inventory(kernels={"error": "CXX is '/nope', which is not on the PATH"}))
    assert check.repair == "unset CXX"


def test_a_process_that_dies_of_torch_leaves_the_facts_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = machine_checks.take_inventory()
    assert "fact" in found["driver"]
    assert machine_checks.torch(found).status == Status.FAIL
    assert "exit code -6" in machine_checks.torch(found).finding
    for check in (machine_checks.triton, machine_checks.compiler, machine_checks.threads, machine_checks.openmp):
        with pytest.raises(OSError, match=r"exit code -6|come this far"):
            check(found)


@pytest.mark.parametrize(("governors", "status"), [({"performance"}, "OK"), ({"powersave", "performance"}, "WARN")])
def test_a_governor_that_saves_power_is_announced(
    governors: set[str], status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(governors):
        (tmp_path / f"cpu{number}" / "cpufreq").mkdir(parents=True)
        (tmp_path / f"cpu{number}" / "cpufreq" / "scaling_governor").write_text(f"{name}\n")
    monkeypatch.setattr(machine_checks, "CPUS", tmp_path)
    assert machine_checks.governor().status == status


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
    table, as_json = (CliRunner().invoke(app, ["doctor", *more]) for more in ([], ["--json"]))
    assert (table.exit_code, as_json.exit_code) == (code, code)
    assert "looked" in table.stdout
    assert "repair it" in table.stdout
    assert json.loads(as_json.stdout) == as_dict([DoctorCheck("a", status, "looked", "repair it")])
