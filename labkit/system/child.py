"""A command that is run to its end, for what it prints."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from labkit.system.errors import RunError
from labkit.system.lifetime import kill_session

LAST_LINES = 12
LOOK_S = 0.2  # between two looks at whether this thread was interrupted


def finished(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`command` at its end, with what it has printed; it gets `environment`, or this process's.

    Unlike `subprocess.run`, which a thread leaves only when the command does, it ends the command where the thread is
    interrupted.
    """
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    said, complained = process.communicate(timeout=LOOK_S)
                    return subprocess.CompletedProcess(command, process.returncode, said, complained)
        except BaseException:
            process.kill()
            process.wait()  # leaving the context does not, after a KeyboardInterrupt
            raise


def run_child(command: Sequence[str], failed: str, *, environment: Mapping[str, str] | None = None) -> str:
    """The stdout of `command`, which gets `environment`, or this process's. RunError, which begins with `failed` and
    ends with the last lines of its stderr, where it fails.
    """
    done = finished(command, environment=environment)
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-LAST_LINES:])
        raise RunError(f"{failed}\n{last}")
    return done.stdout


def child_lines(
    command: Sequence[str], failed: str, *, given: str = "", environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The lines that `command` prints, as it prints them; it reads `given` from its stdin.

    RunError as from `run_child`. The command is ended where nobody takes more lines, or the thread is interrupted.
    """
    with tempfile.TemporaryFile("w+") as complaints, tempfile.TemporaryFile("w+") as stdin:
        stdin.write(given)
        stdin.seek(0)
        process = subprocess.Popen(
            command, env=environment, stdin=stdin, stdout=subprocess.PIPE, stderr=complaints, start_new_session=True
        )
        try:
            yield from _lines(process)
            code = process.wait()
        finally:
            kill_session(process)
            assert process.stdout is not None
            process.stdout.close()
        if code:
            complaints.seek(0)
            last = "\n".join(complaints.read().splitlines()[-LAST_LINES:])
            raise RunError(f"{failed}{_cause(code)}\n{last}".rstrip())


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not waiting.select(LOOK_S):
                continue
            got = os.read(process.stdout.fileno(), 1 << 16)
            if not got:
                return
            *lines, rest = (rest + got).split(b"\n")
            yield from (line.decode() for line in lines)


def _cause(code: int) -> str:
    if code != -signal.SIGKILL:
        return ""
    return ": its process was killed, as the system does when memory runs out"
