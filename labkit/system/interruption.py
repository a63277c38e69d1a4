"""Ending what another thread does, as Ctrl-C ends what the main thread does."""

from __future__ import annotations

import ctypes
import threading


def interrupt(thread: threading.Thread, error: type[BaseException] | None) -> None:
    """Raises `error` in a thread as soon as it executes Python again; None takes back one that was not raised yet.

    A thread that waits for a process notices it at its next look at the clock (`labkit.system.child.finished`).
    """
    if thread.ident is not None:
        raised = ctypes.py_object(error) if error else None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), raised)
