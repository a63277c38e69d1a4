"""Processes that do not outlive who started them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None) -> None:
    """Have the system kill this process when the thread that started it ends, in whatever way; Linux only.

    parent: its process id, for a process that may have lost it before this call.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it could be asked for
        os.kill(os.getpid(), signal.SIGKILL)


def kill_session(process: subprocess.Popen[Any]) -> None:
    """Kill a process that leads a session, with what it started there, and wait for its end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
