"""The output of a command is read; the command ends cleanly on Ctrl-C or timeout, and is killed only if it must be."""

import os
import signal
import sys
import threading

import psutil
import pytest

from labkit.nsys import process
from labkit.nsys.process import Ended, run
from labkit.system.others_clock import LoadLap

PATIENT = "import time; print('ready', flush=True); time.sleep(60)"
POLITE = f"""
try:
    {PATIENT.replace("; ", chr(10) + "    ")}
except KeyboardInterrupt:
    print("written"); raise SystemExit(7)
"""
STUBBORN = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {PATIENT}"


def python(program: str, **options: object) -> Ended:
    return run([sys.executable, "-c", program], os.environ, **options)  # type: ignore[arg-type]


def test_lines_come_as_they_are_printed_and_the_last_are_kept() -> None:
    lines: list[str] = []
    ended = python(
        "import sys; [print(i) for i in range(140)]; print('bad', file=sys.stderr); sys.exit(3)", echo=lines.append
    )
    assert ended.exit_code == 3
    assert not ended.interrupted
    assert not ended.late
    assert [line for line in lines if line != "bad"] == [str(i) for i in range(140)]
    assert len(ended.said) == process.TAIL_LINES
    assert "139" in ended.said


def test_blank_lines_are_passed_on_and_are_none_of_the_last_lines() -> None:
    lines: list[str] = []
    ended = python("print('a\\n\\n  \\nb')", echo=lines.append)
    assert lines == ["a", "", "  ", "b"]
    assert ended.said == ("a", "b")


def test_output_of_nsys_about_its_own_work_is_left_out() -> None:
    output_lines = [
        "Generating '/tmp/nsys-report-1.qdstrm'",
        "[1/2] [===50%   ] out.nsys-rep",
        "Generated:",
        "    /out.sqlite",
        "[1] mine",
    ]
    assert python(f"print(chr(13).join({output_lines!r}))").said == ("[1] mine",)


def test_bytes_that_are_no_text_do_no_harm() -> None:
    assert python(r"import sys; sys.stdout.buffer.write(b'\xff\xfe!')").said == ("\ufffd\ufffd!",)


def test_input_is_at_its_end() -> None:
    assert python("print(repr(input()))").exit_code == 1


def test_ctrl_c_reaches_the_command_which_may_still_write() -> None:
    def press_when_ready(line: str) -> None:
        if line == "ready":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    ended = python(POLITE, echo=press_when_ready)
    assert ended.interrupted
    assert ended.exit_code == 7
    assert ended.said[-1] == "written"


def test_a_late_command_is_asked_then_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.5)
    assert python(POLITE, timeout_s=1.0).late
    ended = python(STUBBORN, timeout_s=1.0)
    assert ended.late
    assert ended.exit_code == -signal.SIGKILL


def test_what_a_failed_command_leaves_running_is_ended() -> None:
    daemon = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid); sys.exit(3)
"""
    (pid,) = python(daemon).said
    assert not psutil.pid_exists(int(pid))


def test_a_listener_that_cannot_go_on_ends_the_command() -> None:
    """rich raises this if the pipe that it prints to is closed."""
    pids: list[int] = []

    def listen(line: str) -> None:
        pids.append(int(line))
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        python(f"import os; print(os.getpid(), flush=True); {PATIENT}", echo=listen)
    assert not psutil.pid_exists(pids[0])


def test_a_missing_program_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        run(["no-such-program"], os.environ)


def test_the_load_of_other_programs_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lap is read before the command, later ones every second; the time of the command does not count."""
    taken = iter([0.0, 1.5, 1.25])
    monkeypatch.setattr(
        "labkit.nsys.process.OthersClock.whole_lap",
        lambda clock: LoadLap(others=cores, idle=0.0) if (cores := next(taken, None)) is not None else None,
    )
    assert python("import time; time.sleep(0.6)").taken_cores == 1.25


def test_what_the_command_starts_is_its_own_and_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[int] = []
    monkeypatch.setattr("labkit.nsys.process.OthersClock.add", lambda clock, process: added.append(process.pid))
    child = "import time; time.sleep(1)"
    ended = python(
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]); print(p.pid); p.wait()"
    )
    assert int(ended.said[-1]) in added
    assert os.getpid() not in added
