"""Interrupts: Ctrl-C that waits until imports and finalizers have ended, and an interrupt of another thread.

A library may catch a KeyboardInterrupt while it is imported, and Python drops one that is raised in a finalizer. The
command would then go on, or fail for another reason.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ASK_AGAIN_S = 0.05
INTERRUPTED = 130


@contextmanager
def interrupts_after_imports() -> Iterator[None]:
    """Inside this context Ctrl-C raises KeyboardInterrupt as soon as no import or finalizer runs. A second Ctrl-C
    before that ends the process with exit code 130. Nothing changes outside of the main thread, or if the program has
    its own handlers for SIGINT or SIGALRM.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL
    ):
        yield
        return
    pending = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        if not _would_be_dropped(frame):
            pending = False
            raise KeyboardInterrupt
        if pending and number == signal.SIGINT:
            os._exit(INTERRUPTED)
        pending = True
        signal.setitimer(signal.ITIMER_REAL, ASK_AGAIN_S)

    for number in (signal.SIGINT, signal.SIGALRM):
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if pending:
            raise KeyboardInterrupt


def interrupt(thread: threading.Thread, error: type[BaseException] | None) -> None:
    """Raises `error` in a thread as soon as it executes Python again. None cancels an error that was not raised yet.

    A thread in `labkit.system.child.finished` notices it within 0.2 s.
    """
    if thread.ident is not None:
        raised = ctypes.py_object(error) if error else None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), raised)


def _would_be_dropped(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>" or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
