"""Ctrl-C during the import of a library that catches every exception."""

import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = """
import os, signal, time
caught = False
try:
    for _ in range({times}):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
except BaseException:
    caught = True
print("caught" if caught else "not caught", flush=True)
"""
PROGRAM = """
import sys, time
sys.path.insert(0, sys.argv[1])
from labkit.system.interrupts import interrupts_after_imports
try:
    with interrupts_after_imports():
        import library
        time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(("times", "output", "code"), [(1, "not caught\ninterrupted\n", 0), (2, "", 130)])
def test_an_interrupted_import_ends_before_the_program_does(times: int, output: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(LIBRARY.format(times=times))
    process = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False, timeout=50
    )
    assert (process.stdout, process.stderr, process.returncode) == (output, "", code)


def test_an_interrupt_during_the_last_import_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(LIBRARY.format(times=1).replace("0.2", "0"))
    program = PROGRAM.replace("        time.sleep(60)\n", "")
    process = subprocess.run(
        [sys.executable, "-P", "-c", program, str(tmp_path)], capture_output=True, text=True, check=False, timeout=50
    )
    assert (process.stdout, process.returncode) == ("not caught\ninterrupted\n", 0)


FIRST = """
import re, signal, sys
before = set(sys.modules)
def first(number, handler):
    print(*sorted(sys.modules.keys() - before))
    sys.exit()
signal.signal = first
from labkit.cli.main import main
main()
"""


def test_the_command_loads_next_to_nothing_before_it_handles_an_interrupt() -> None:
    """The script of the command has loaded `re`, and with it the modules that signal needs."""
    process = subprocess.run([sys.executable, "-P", "-c", FIRST], capture_output=True, text=True, check=True)
    expected = {"labkit", "labkit.cli", "labkit.cli.main", "labkit.system", "labkit.system.interrupts"}
    assert set(process.stdout.split()) - {"__future__"} == expected


ELSEWHERE = """
import signal, threading
from labkit.system.interrupts import interrupts_after_imports
def handlers():
    with interrupts_after_imports():
        seen.append((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)))
seen, usual = [], (signal.default_int_handler, signal.SIG_DFL)
thread = threading.Thread(target=handlers)
thread.start()
thread.join()
handlers()
signal.signal(signal.SIGINT, signal.SIG_IGN)
handlers()
assert seen[0] == usual
assert seen[1][0] == seen[1][1] != usual[0]
assert seen[2] == (signal.SIG_IGN, signal.SIG_DFL)
"""


def test_another_thread_and_a_program_with_handlers_keep_them() -> None:
    subprocess.run([sys.executable, "-P", "-c", ELSEWHERE], check=True, timeout=50)
