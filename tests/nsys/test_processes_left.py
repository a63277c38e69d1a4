"""No process of a capture outlives it, whether the capture succeeds, fails, is interrupted or is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from helpers.nsys.nsight import NSYS
from helpers.sweeps import swept

pytestmark = pytest.mark.timeout(120)
# The worst case of the real nsys: it starts an agent, which is a daemon that outlives it, and then the program.
FAKE_NSYS = """#!{python}
import sqlite3, subprocess, sys
if sys.argv[1] == "--version":
    print("NVIDIA Nsight Systems version 2024.1.1.1-0")
    sys.exit()
first = next(place for place, word in enumerate(sys.argv[2:], 2) if not word.startswith("--"))
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
ended = subprocess.run(sys.argv[first:])
options = dict(word[2:].split("=", 1) for word in sys.argv[2:first])
with sqlite3.connect(options["output"] + ".sqlite") as rows:
    rows.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    columns = ("start", "end", "eventType", "textId", "globalTid")
    rows.execute(f"CREATE TABLE NVTX_EVENTS ({{' INTEGER, '.join(columns)}} INTEGER)")
    rows.execute("INSERT INTO StringIds VALUES (1, 'decode/step')")
    rows.execute("INSERT INTO NVTX_EVENTS VALUES (0, 9, 59, 1, 16777217)")
sys.exit(ended.returncode)
"""
PROGRAM = """
import pathlib, sys, time
import labkit.stages as stages
with stages.StepRanges() as ranges:
    ranges.begin(stages.Phase.DECODE)
folder = pathlib.Path(sys.argv[1])
(folder / "ready").touch()
until = time.monotonic() + (1 if sys.argv[2] in ("success", "failure") else 600)
while time.monotonic() < until:
    time.sleep(0.05)
sys.exit(3 * (sys.argv[2] == "failure"))
"""
ENDINGS = ("success", "failure", "interrupt", "kill")
OWNER = """
import sys
from labkit.nsys.capture.profile import profile
profile(sys.argv[2:], output=sys.argv[1], source="nsys", tax=False)
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    nsys = tmp_path / "nsys"
    nsys.write_text(FAKE_NSYS.format(python=sys.executable))
    nsys.chmod(0o755)
    return nsys


@pytest.fixture(autouse=True)
def swept_up(tmp_path: Path) -> Iterator[None]:
    yield
    for leftover in processes(tmp_path):
        leftover.kill()


def processes(folder: Path) -> list[psutil.Process]:
    """Processes of the capture: their command lines or environments contain this test's folder."""
    matches = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                str(folder) in " ".join([*process.cmdline(), *process.environ().values()])
                and process.pid != os.getpid()
            ):
                matches.append(process)
    return matches


@pytest.mark.parametrize("case", swept([f"{nsys}-{end}" for nsys in ("fake", "real") for end in ENDINGS], []))
def test_no_process_of_a_capture_is_left(case: str, fake: Path, tmp_path: Path) -> None:
    nsys, ending = case.split("-")
    if nsys == "real" and NSYS is None:
        pytest.skip("nsys is not installed; labkit doctor says how to")
    program = NSYS.path if nsys == "real" and NSYS else fake
    environment = os.environ | {"LABKIT_NSYS": str(program), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-P", "-c", PROGRAM, str(tmp_path), ending]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", OWNER, str(tmp_path / "out"), *command], env=environment
    ) as owner:
        while not (tmp_path / "ready").exists():
            assert owner.poll() is None
            time.sleep(0.05)
        assert len(processes(tmp_path)) >= 4  # the owner, its watcher, nsys, the agent, the program
        if ending in ("interrupt", "kill"):
            owner.send_signal(signal.SIGINT if ending == "interrupt" else signal.SIGKILL)
        ended = owner.wait()
    assert (ended == 0) == (ending == "success")
    if ending == "kill":  # the watcher ends the other processes when its owner is gone
        deadline = time.monotonic() + 60
        while processes(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert processes(tmp_path) == []
