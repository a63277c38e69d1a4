"""Commands run to their end, or are ended when the waiting thread is interrupted."""

import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from labkit.system.child import child_lines, finished, run_child
from labkit.system.errors import RunError
from labkit.system.interrupts import interrupt


def test_a_command_tells_what_it_printed_and_how_it_ended() -> None:
    process = finished([sys.executable, "-c", "import sys; print('out'); sys.exit('why')"])
    assert (process.stdout, process.stderr, process.returncode) == ("out\n", "why\n", 1)
    with pytest.raises(RunError, match="it failed\nwhy"):
        run_child([sys.executable, "-c", "import sys; sys.exit('why')"], "it failed")


def test_an_interrupted_thread_ends_the_command_that_it_waits_for(tmp_path: Path) -> None:
    pid_file, raised = tmp_path / "pid", []
    program = (
        f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(f'{{os.getpid()}} '); time.sleep(600)"
    )

    def wait() -> None:
        try:
            finished([sys.executable, "-c", program])
        except KeyboardInterrupt as error:
            raised.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while not (pid_file.exists() and pid_file.read_text().endswith(" ")):
        thread.join(0.01)
    interrupt(thread, KeyboardInterrupt)
    thread.join(60)
    assert raised
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_lines_come_as_they_are_printed() -> None:
    program = "import sys; print(sys.stdin.read(), flush=True); print('more'); sys.exit('why')"
    lines = child_lines([sys.executable, "-c", program], "it failed", given="given")
    assert [next(lines), next(lines)] == ["given", "more"]
    with pytest.raises(RunError, match="it failed\nwhy"):
        next(lines)


def test_output_that_is_not_utf_8_is_replaced() -> None:
    program = r"import os, sys; os.write(1, b'\xe9\n'); os.write(2, b'\xff why\n'); sys.exit(int(sys.argv[1]))"
    command = [sys.executable, "-c", program]
    assert run_child([*command, "0"], "it failed") == "\ufffd\n"
    with pytest.raises(RunError, match="it failed\n\ufffd why"):
        run_child([*command, "1"], "it failed")
    lines = child_lines([*command, "1"], "it failed")
    assert next(lines) == "\ufffd"
    with pytest.raises(RunError, match="it failed\n\ufffd why"):
        next(lines)


def test_a_command_is_ended_where_nobody_takes_more_lines() -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    lines = child_lines([sys.executable, "-c", program], "it failed")
    pid = int(next(lines))
    assert psutil.pid_exists(pid)
    lines.close()  # type: ignore[attr-defined]
    assert not psutil.pid_exists(pid)


def test_an_interrupt_while_a_process_starts_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """At whatever moment it comes: before the process begins, and after it began, before its id is known."""
    begin = subprocess.Popen
    processes: list[subprocess.Popen[bytes]] = []

    def slowly(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        interrupt(thread, KeyboardInterrupt)
        time.sleep(0.2)
        processes.append(begin(*args, **options))
        interrupt(thread, KeyboardInterrupt)
        time.sleep(0.2)
        return processes[-1]

    def wait() -> None:
        with suppress(KeyboardInterrupt):
            finished([sys.executable, "-c", "import time; time.sleep(600)"])

    monkeypatch.setattr(subprocess, "Popen", slowly)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(60)
    assert [process.poll() for process in processes] == [-signal.SIGKILL]
