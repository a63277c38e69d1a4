"""Interrupting another thread, as Ctrl-C interrupts the main thread."""

from __future__ import annotations

import ctypes
import threading


def interrupt(thread: threading.Thread, error: type[BaseException] | None) -> None:
    """Raises `error` in a thread as soon as it executes Python again. None cancels an error that was not raised yet.

    A thread in `labkit.system.child.finished` notices it within 0.2 s.
    """
    if thread.ident is not None:
        raised = ctypes.py_object(error) if error else None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), raised)
