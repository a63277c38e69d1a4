"""Stale segments of nsys are removed, but never those of one that runs."""

import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from labkit.nsys import shared_memory
from labkit.nsys.shared_memory import sweep_shared_memory


@pytest.fixture
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like /dev/shm, seen from a machine on which only the processes of this test run."""
    mine = psutil.Process()
    monkeypatch.setattr(shared_memory.psutil, "process_iter", lambda _: [_known(child) for child in mine.children()])
    for name in ("NSys-2022.4.2.1", "quadd-agent-instance-18556", "sem.nsys_sem_2491", "sem.mp-abc", "torch_1_2"):
        (tmp_path / name).write_bytes(b"\0" * 64)
    return tmp_path


def _known(process: psutil.Process) -> psutil.Process:
    process.info = process.as_dict(["name", "status"])
    return process


def launcher(folder: Path) -> Path:
    """A program with a name of nsys's that sleeps."""
    return Path(shutil.copy(shutil.which("sleep") or "", folder / "nsys-launcher"))


def test_what_a_killed_nsys_left_is_removed_and_nothing_else(segments: Path) -> None:
    sweep_shared_memory(segments)
    assert {file.name for file in segments.iterdir()} == {"sem.mp-abc", "torch_1_2"}


def test_nothing_is_removed_while_an_nsys_runs(segments: Path) -> None:
    program = launcher(segments)
    kept = {file.name for file in segments.iterdir()}
    with subprocess.Popen([program, "60"]) as running:
        try:
            sweep_shared_memory(segments)
        finally:
            running.kill()
    assert {file.name for file in segments.iterdir()} == kept


def test_who_has_patience_waits_for_an_nsys_that_ends(segments: Path) -> None:
    with subprocess.Popen([launcher(segments), "0.3"]):
        sweep_shared_memory(segments, patience_s=30)
    assert {file.name for file in segments.iterdir()} == {"sem.mp-abc", "torch_1_2", "nsys-launcher"}
