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
