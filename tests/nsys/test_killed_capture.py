"""A killed capture leaves no process of its own, of nsys or of the program, and no report."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from labkit.nsys.capture.job import workplace

pytestmark = pytest.mark.timeout(120)
TOKEN = "hf_planted0123456789"
# Like the real nsys, it starts a daemon that starts the program, and writes next to its output and into TMPDIR.
NSYS = """#!{python}
import os, subprocess, sys, time
if sys.argv[1] == "--version":
    print("NVIDIA Nsight Systems version 2024.1.1.1-0")
    sys.exit()
options = dict(word[2:].split("=", 1) for word in sys.argv[2:] if word.startswith("--"))
program = [word for word in sys.argv[2:] if not word.startswith("--")]
for report in (options["output"] + ".qdstrm", os.environ["TMPDIR"] + "/nsys-report-1.qdstrm"):
    with open(report, "w") as file:
        file.write(os.environ["API_TOKEN"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        subprocess.run(program)
    os._exit(0)
time.sleep(600)
"""
PROGRAM = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
OWNER = """
import sys
from labkit.nsys.capture.profile import profile
profile(sys.argv[2:], output=sys.argv[1], source="nsys", tax=False)
"""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture
def owner(
    output: Path, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that captures a program; the program is already running."""
    nsys, ready = tmp_path / "nsys", tmp_path / "ready"
    nsys.write_text(NSYS.format(python=sys.executable))
    nsys.chmod(0o755)
    for name, value in (("LABKIT_NSYS", nsys), ("TMPDIR", temporary), ("API_TOKEN", TOKEN)):
        monkeypatch.setenv(name, str(value))
    command = [sys.executable, "-P", "-c", PROGRAM, str(ready)]
    with subprocess.Popen([sys.executable, "-P", "-c", OWNER, str(output), *command]) as process:
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.05)
        yield process
        process.kill()
    for leftover in processes(tmp_path):
        leftover.kill()


def processes(folder: Path) -> list[psutil.Process]:
    """Processes whose command lines name this test's folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(process.info["cmdline"] or [])
    ]


def reports(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and TOKEN in file.read_text(errors="replace")]


def test_a_killed_capture_takes_nsys_and_the_program_with_it(
    owner: subprocess.Popen[bytes], output: Path, temporary: Path, tmp_path: Path
) -> None:
    assert len(processes(tmp_path)) >= 4  # the owner, nsys, its daemon, the program, and the watcher
    assert len([*reports(output), *reports(temporary)]) == 2
    owner.kill()
    owner.wait()
    while processes(tmp_path):
        time.sleep(0.05)
    assert list(output.iterdir()) == []
    assert list(temporary.iterdir()) == []


def test_the_next_capture_sweeps_what_a_dead_one_left_and_nothing_of_a_live_one(
    owner: subprocess.Popen[bytes], output: Path, temporary: Path, tmp_path: Path
) -> None:
    running = processes(tmp_path)
    with workplace(output, temporary):
        pass
    assert all(process.is_running() for process in running)
    (watcher,) = (process for process in running if "labkit.system.marked_run" in process.cmdline())
    watcher.kill()
    owner.kill()
    owner.wait()
    assert len([*reports(output), *reports(temporary)]) == 2
    with workplace(output, temporary) as place:
        assert list(output.iterdir()) == [place.folder]
        assert list(temporary.iterdir()) == [place.scratch]
    assert processes(tmp_path) == []
