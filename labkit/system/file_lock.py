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
    """Context in which one process at a time is, of those that name the same file. The file is removed at the end.

    A process that has waited for `most_s` seconds goes on beside the other, which may hang. So does a process where the
    file can't be made or locked.
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
