"""Processes that do not outlive the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
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


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process in a session of its own, which ends with this context; its pipes are closed. options: as of `Popen`.

    Another thread starts it. An interrupt of this thread could otherwise come after the process began and before
    anything here knew its id, so that it would go on.
    """
    begun: list[subprocess.Popen[Any]] = []
    try:
        _starter.submit(lambda: begun.append(subprocess.Popen(command, start_new_session=True, **options))).result()
        yield begun[0]
    finally:
        _starter.submit(lambda: None).result()  # by now the process has begun, or an interrupt came before
        for process in begun:
            kill_session(process)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


# One thread that lives as long as this process, because of `end_with_parent`.
_starter = ThreadPoolExecutor(1, "starts-processes")


def kill_session(process: subprocess.Popen[Any]) -> None:
    """Kills a process that leads a session, with the processes of its process group, and waits for its end.

    A descendant that has moved to a process group of its own, such as a job of an interactive shell, is not killed.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
