"""Work that one process does, so that other processes find its result instead of doing it again."""

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
    """A context that one process at a time enters, among all processes that name the same file. The file is removed at
    the end.

    After `most_s` seconds a process enters without the lock, because the other process may hang. So does a process that
    can't make or lock the file.
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
