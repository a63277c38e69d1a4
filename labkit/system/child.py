"""Commands that run to their end, and their output."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from labkit.system.errors import RunError
from labkit.system.lifetime import started

LAST_LINES = 12
LOOK_S = 0.2  # between two looks at whether this thread was interrupted


def finished(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `command` to its end and returns it with its output. It gets `environment`, or this process's.

    Bytes that are not UTF-8 are replaced. An interrupted thread ends the command. In `subprocess.run` the thread would
    first wait for the command.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, env=environment, encoding="utf-8", errors="replace", **pipes) as process:
        while True:
            with suppress(subprocess.TimeoutExpired):
                stdout, stderr = process.communicate(timeout=LOOK_S)
                return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def run_child(command: Sequence[str], failed: str, *, environment: Mapping[str, str] | None = None) -> str:
    """Returns the stdout of `command`, which gets `environment`, or this process's.

    RunError if it fails: the message is `failed` and the last lines of stderr.
    """
    completed = finished(command, environment=environment)
    if completed.returncode:
        raise _error(failed, completed.returncode, completed.stderr)
    return completed.stdout


def child_lines(
    command: Sequence[str], failed: str, *, given: str = "", environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yields the lines that `command` prints, as it prints them, without an incomplete last line. `given` is its stdin.

    RunError as from `run_child`. The command is ended when nobody takes more lines, or the thread is interrupted.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as stderr, tempfile.TemporaryFile("w+") as stdin:
        stdin.write(given)
        stdin.seek(0)
        with started(command, env=environment, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr) as process:
            yield from _lines(process)
            code = process.wait()
        if code:
            stderr.seek(0)
            raise _error(failed, code, stderr.read())


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not waiting.select(LOOK_S):
                continue
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)


def _error(failed: str, code: int, stderr: str) -> RunError:
    killed = ": its process was killed, as the system does when memory runs out" * (code == -signal.SIGKILL)
    last = "\n".join(stderr.splitlines()[-LAST_LINES:])
    return RunError(f"{failed}{killed}\n{last}".rstrip())
