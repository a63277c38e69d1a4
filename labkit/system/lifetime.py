"""Processes that do not outlive the process that started them."""

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
    """Has the system kill this process when the thread that started it ends for any reason. Linux only.

    parent: the process id of the parent, in case the parent may have ended before this call.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def kill_session(process: subprocess.Popen[Any]) -> None:
    """Kills a process that leads a session, with all processes of the session, and waits for its end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
