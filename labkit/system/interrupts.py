"""Interrupts: Ctrl-C that waits until imports and finalizers have ended, and an interrupt of another thread.

A library may catch a KeyboardInterrupt while it is imported, and Python drops one that is raised in a finalizer. The
command would then go on, or fail for another reason.

The command imports this module before it can handle Ctrl-C, so it loads nothing that Python has not loaded by then.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from threading import Thread
    from types import FrameType

ASK_AGAIN_S = 0.05
INTERRUPTED = 130


class interrupts_after_imports:
    """Inside this context Ctrl-C raises KeyboardInterrupt as soon as no import or finalizer runs. A second Ctrl-C
    before that ends the process with exit code 130. Nothing changes outside of the main thread, or if the program has
    its own handlers for SIGINT or SIGALRM.
    """

    def __init__(self) -> None:
        self._pending = self._handles = False

    def __enter__(self) -> None:
        if (
            signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL
        ):
            return
        try:
            for number in (signal.SIGINT, signal.SIGALRM):
                signal.signal(number, self._on_signal)
        except ValueError:  # only the main thread can handle signals
            return
        self._handles = True

    def __exit__(self, *error: object) -> None:
        if not self._handles:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._pending:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not _would_be_dropped(frame):
            self._pending = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt
        if self._pending and number == signal.SIGINT:
            os._exit(INTERRUPTED)
        self._pending = True
        # Again and again: an alarm just before a system call is noticed only when the call ends, or at the next alarm.
        signal.setitimer(signal.ITIMER_REAL, ASK_AGAIN_S, ASK_AGAIN_S)


def interrupt(thread: Thread, error: type[BaseException] | None) -> None:
    """Raises `error` in a thread as soon as it executes Python again. None cancels an error that was not raised yet.

    A thread in `labkit.system.child.finished` notices it within 0.2 s.
    """
    import ctypes

    if thread.ident is not None:
        raised = ctypes.py_object(error) if error else None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), raised)


def _would_be_dropped(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>" or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
