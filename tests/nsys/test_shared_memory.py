"""Stale segments of nsys are removed, but never while an nsys runs."""

import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from labkit.nsys import agent
from labkit.nsys.agent import sweep_shared_memory


@pytest.fixture
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like /dev/shm. Only the processes of this test seem to run on the machine."""
    own_process = psutil.Process()
    monkeypatch.setattr(agent.psutil, "process_iter", lambda _: [_known(child) for child in own_process.children()])
    for name in ("NSys-2022.4.2.1", "quadd-agent-instance-18556", "sem.nsys_sem_2491", "sem.mp-abc", "torch_1_2"):
        (tmp_path / name).write_bytes(b"\0" * 64)
    return tmp_path


def _known(process: psutil.Process) -> psutil.Process:
    process.info = process.as_dict(["name", "status"])
    return process


def launcher(folder: Path) -> Path:
    """A copy of `sleep` with the name of a program of nsys."""
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


def test_with_patience_a_running_nsys_is_waited_for(segments: Path) -> None:
    with subprocess.Popen([launcher(segments), "0.3"]):
        sweep_shared_memory(segments, patience_s=30)
    assert {file.name for file in segments.iterdir()} == {"sem.mp-abc", "torch_1_2", "nsys-launcher"}
