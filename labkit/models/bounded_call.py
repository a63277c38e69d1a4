"""A call of a stranger's code in a process of its own, with bounds on its time, memory and result."""

from __future__ import annotations

import gc
import os
import resource
import selectors
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SECONDS, MEMORY_BYTES, RESULT_BYTES = 10.0, 1 << 30, 2 << 20
DONE, FAILED = b"d", b"f"


class BoundedCallError(Exception):
    """The call raised, or exceeded a bound. The message says which, in one line."""


def bounded_call(
    call: Callable[[], str], *, seconds: float = SECONDS, memory_bytes: int = MEMORY_BYTES, most: int = RESULT_BYTES
) -> str:
    """Returns the result of `call`, which may take `seconds`, `memory_bytes` more than this process has now, and
    `most` bytes of text.

    The call runs in a fork of this process. The fork starts in milliseconds, has all loaded modules, and has ended when
    this function returns. BoundedCallError: the call raised, was too slow, or needed too much.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the fork calls nothing that other threads may hold
        child = os.fork()
    if child == 0:
        os.close(reading)  # so that a write fails once the parent is gone
        _run(call, writing, seconds, memory_bytes)
    os.close(writing)
    try:
        output = _read(reading, time.monotonic() + seconds, most)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if output is None:
        raise BoundedCallError(f"it takes more than {seconds:g} s")
    if len(output) > most:
        raise BoundedCallError(f"it produces more than {most >> 20} MB of text")
    kind, text = output[:1], output[1:].decode(errors="replace")
    if kind == DONE:
        return text
    if kind == FAILED:
        raise BoundedCallError(text)
    raise BoundedCallError(f"its process was ended by signal {os.WTERMSIG(status)}, as happens when memory runs out")


def _run(call: Callable[[], str], writing: int, seconds: float, memory_bytes: int) -> None:
    """Runs the call in the fork. Never returns."""
    try:
        gc.disable()  # a collection here would finalize the parent's objects
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with suppress(OSError, ValueError):  # no /proc, or the limits are narrower already
            present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (present + memory_bytes,) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1,) * 2)  # in case the parent is killed meanwhile
        output = DONE + call().encode(errors="surrogateescape")
    except MemoryError:
        output = FAILED + f"it needs more than {memory_bytes >> 20} MB of memory".encode()
    except BaseException as error:  # noqa: BLE001  the caller reports every error of the call
        message = " ".join(str(error).split())[:400]
        output = FAILED + (message or type(error).__name__).encode(errors="replace")
    with suppress(BaseException):
        while output:
            output = output[os.write(writing, output) :]
    os._exit(0)


def _read(reading: int, until: float, most: int) -> bytes | None:
    """All that the fork wrote until it ended; None if that takes too long."""
    parts, size = [], 0
    with selectors.DefaultSelector() as waiting:
        waiting.register(reading, selectors.EVENT_READ)
        while size <= most:
            if not waiting.select(max(0.0, until - time.monotonic())):
                return None
            chunk = os.read(reading, 1 << 16)
            if not chunk:
                break
            parts.append(chunk)
            size += len(chunk)
    return b"".join(parts)
