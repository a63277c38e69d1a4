"""One process at a time does the work, and a process that hangs or is gone stops no other."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep

import pytest

from labkit.system.file_lock import one_process

HOLD = "import sys; from pathlib import Path; from labkit.system.file_lock import one_process\n"
PROGRAM = HOLD + "with one_process(Path(sys.argv[1]), 9): print('in', flush=True); sys.stdin.read()"


def holder(lock: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    return process


def test_the_work_of_one_is_found_by_the_others(tmp_path: Path) -> None:
    result, made = tmp_path / "result", []

    def work() -> None:
        with one_process(tmp_path / "lock", 60):
            if not result.exists():
                sleep(0.1)
                made.append(1)
                result.touch()

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work) for _ in range(8)]:
            done.result()
    assert made == [1]
    assert list(tmp_path.iterdir()) == [result]


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    process = holder(tmp_path / "lock")
    process.kill()
    process.communicate()
    start = monotonic()
    with one_process(tmp_path / "lock", 60):
        assert monotonic() - start < 30
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_hangs_is_waited_for_no_longer_than_wanted(tmp_path: Path) -> None:
    process = holder(tmp_path / "lock")
    os.kill(process.pid, signal.SIGSTOP)
    start = monotonic()
    with one_process(tmp_path / "lock", 0.3):
        assert monotonic() - start >= 0.3
    os.kill(process.pid, signal.SIGCONT)
    process.communicate()
    assert process.returncode == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="this user may write to read-only folders")
def test_a_folder_that_cannot_be_written_stops_no_work(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with one_process(tmp_path / "lock", 1):
        pass


def test_a_folder_that_is_missing_stops_no_work(tmp_path: Path) -> None:
    with one_process(tmp_path / "missing" / "lock", 1):
        pass
