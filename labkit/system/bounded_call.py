"""A call of code that a stranger wrote, in a process of its own with bounds of time, memory and result."""

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

SECONDS, MEMORY_BYTES, RESULT_BYTES = 10.0, 1 << 30, 16 << 20
DONE, FAILED = b"d", b"f"


class BoundedCallError(Exception):
    """The call raised, or went beyond a bound. The message says which, in one line."""


def bounded_call(
    call: Callable[[], str], *, seconds: float = SECONDS, memory_bytes: int = MEMORY_BYTES, most: int = RESULT_BYTES
) -> str:
    """What `call` returns, of `most` bytes at most, in `seconds` and with `memory_bytes` beyond what this process has.

    The call runs in a fork of this process. The fork starts in milliseconds, has all loaded modules, and has ended when
    this function returns. BoundedCallError: the call raised, was too slow, or wanted too much.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the fork calls nothing that other threads may hold
        child = os.fork()
    if child == 0:
        _run(call, writing, seconds, memory_bytes)
    os.close(writing)
    try:
        told = _read(reading, time.monotonic() + seconds, most)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if told is None:
        raise BoundedCallError(f"it takes more than {seconds:g} s")
    if len(told) > most:
        raise BoundedCallError(f"it makes more than {most >> 20} MB of text")
    kind, text = told[:1], told[1:].decode(errors="replace")
    if kind == DONE:
        return text
    if kind == FAILED:
        raise BoundedCallError(text)
    raise BoundedCallError(f"its process was ended by signal {os.WTERMSIG(status)}, as where memory runs out")


def _run(call: Callable[[], str], writing: int, seconds: float, memory_bytes: int) -> None:
    """The fork. It never returns."""
    try:
        gc.disable()  # what this process collects is its parent's
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
        with suppress(OSError, ValueError):  # no /proc, or bounds that are narrower already
            present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (present + memory_bytes,) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1,) * 2)  # should the parent be killed meanwhile
        told = DONE + call().encode(errors="surrogateescape")
    except MemoryError:
        told = FAILED + f"it wants more than {memory_bytes >> 20} MB of memory".encode()
    except BaseException as error:  # noqa: BLE001  whatever it raises is the caller's to tell
        said = " ".join(str(error).split())[:400]
        told = FAILED + (said or type(error).__name__).encode(errors="replace")
    with suppress(BaseException):
        while told:
            told = told[os.write(writing, told) :]
    os._exit(0)


def _read(reading: int, until: float, most: int) -> bytes | None:
    """What the fork wrote to its end; None where that takes too long."""
    parts, size = [], 0
    with selectors.DefaultSelector() as waiting:
        waiting.register(reading, selectors.EVENT_READ)
        while size <= most:
            if not waiting.select(max(0.0, until - time.monotonic())):
                return None
            got = os.read(reading, 1 << 16)
            if not got:
                break
            parts.append(got)
            size += len(got)
    return b"".join(parts)
