"""The doctor's checks of the machine: disks, drivers, cores, software."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.nsys.doctors import by_name
from helpers.nsys.installations import fake_nsys

from labkit.nsys.doctor import examination as doctor
from labkit.nsys.doctor import machine_checks, profiler_checks
from labkit.nsys.doctor.check import Status
from labkit.nsys.doctor.examination import examine
from labkit.nsys.doctor.machine_checks import Inventory
from labkit.nsys.tool import Nsys

WITHOUT_GPU: dict[str, Any] = {"cuda": [12, 2], "gpus": [], "cu_init": 100}


WITH_GPU: dict[str, Any] = {"cuda": [12, 4], "gpus": ["NVIDIA H100"], "cu_init": 0}


TORCH: dict[str, Any] = {"version": "2.13.0", "cuda": "12.6", "gpu": True, "threads": 2}


CPU_TORCH: dict[str, Any] = {"version": "2.13.0+cpu", "cuda": None, "gpu": False, "threads": 2}


GIGABYTE = 1 << 30


def inventory(**facts: Mapping[str, Any]) -> Inventory:
    return Inventory({"driver": WITHOUT_GPU, "torch": CPU_TORCH, **facts})


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
    checks = by_name(examine())
    assert checks["temporary folder"].status == Status.FAIL
    assert "test capture" not in checks


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
    facts = inventory(driver=driver, torch=torch)
    checks = [machine_checks.gpu(facts), machine_checks.driver(facts, nsys)]
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


def test_two_openmp_runtimes_in_one_process_are_announced() -> None:
    one_library, two_libraries = (
        ["/torch/lib/libgomp.so.1"],
        ["/torch/lib/libgomp-a34b3233.so.1", "/usr/lib/libomp.so.5"],
    )
    assert machine_checks.openmp(inventory(openmp={"libraries": one_library})).finding.startswith("GNU")
    check = machine_checks.openmp(inventory(openmp={"libraries": two_libraries}))
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
    facts = machine_checks.take_inventory()
    assert "fact" in facts["driver"]
    assert machine_checks.torch(facts).status == Status.FAIL
    assert "exit code -6" in machine_checks.torch(facts).finding
    for check in (machine_checks.triton, machine_checks.compiler, machine_checks.threads, machine_checks.openmp):
        with pytest.raises(OSError, match=r"exit code -6|ended before this one"):
            check(facts)


@pytest.mark.parametrize(("governors", "status"), [({"performance"}, "OK"), ({"powersave", "performance"}, "WARN")])
def test_a_governor_that_saves_power_is_announced(
    governors: set[str], status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(governors):
        (tmp_path / f"cpu{number}" / "cpufreq").mkdir(parents=True)
        (tmp_path / f"cpu{number}" / "cpufreq" / "scaling_governor").write_text(f"{name}\n")
    monkeypatch.setattr(machine_checks, "CPUS", tmp_path)
    assert machine_checks.governor().status == status
