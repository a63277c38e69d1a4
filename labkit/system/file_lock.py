"""Work that one process at a time does, so that others find its result instead of doing it again."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

LOOK_S = 0.05


@contextmanager
def one_process(lock: Path, most_s: float) -> Iterator[None]:
    """Context that only one process enters at a time, of the processes that name the same file. The file is removed at
    the end.

    After `most_s` seconds a process no longer waits, because the other one may hang. It doesn't wait either if the file
    can't be made or locked.
    """
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        _wait(descriptor, monotonic() + most_s)
        yield
    finally:
        with suppress(OSError):
            lock.unlink()  # the processes that wait have opened it
        os.close(descriptor)


def _wait(descriptor: int, deadline: float) -> None:
    while monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sleep(LOOK_S)
        except OSError:  # a file system without locks
            return
        else:
            return
