"""A command that is run to its end, for what it prints."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from labkit.system.errors import RunError

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
