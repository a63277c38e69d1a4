"""Memory cgroups: groups of processes whose memory Linux limits together, the files that they map included."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from labkit.system.cgroups import own_groups

PREFIX = "labkit-"
NUMBERS = itertools.count()
EMPTY_S = 5.0  # how long the system may take to note that the last process of a group has ended
KILLED = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Files:
    """What the files of a memory cgroup are called in a version of cgroups. The swap is set behind the limit."""

    limit: str
    swap: str
    without_swap: int | None  # what forbids it; None: the limit, which then counts memory and swap
    peak: str
    events: str


V1 = Files(
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    None,
    "memory.max_usage_in_bytes",
    "memory.oom_control",
)
V2 = Files("memory.max", "memory.swap.max", 0, "memory.peak", "memory.events")


class MemoryGroup:
    """A memory cgroup of this process's own. It is a context, at whose end the group is removed, so its processes must
    have ended by then.

    What processes take from the moment on at which they are added counts: anonymous memory, and pages of files that
    they are the first to read. Where it would exceed the limit, pages of files are dropped; where that is not enough,
    a process is killed, and nothing is swapped.
    """

    def __init__(self, folder: Path, files: Files) -> None:
        """`folder` is a new cgroup."""
        self.folder, self._files = folder, files
        self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @classmethod
    def make(cls, limit: int) -> Self | None:
        """A group that may have `limit` bytes, below the one that this process is in, else beside or above it; None
        where the system has none that this user can make.

        What processes of the past that were killed have left is removed.
        """
        for parent, files in _parents():
            _remove_abandoned(parent)
            folder = parent / f"{PREFIX}{os.getpid()}-{next(NUMBERS)}"
            with suppress(OSError):
                folder.mkdir()
                group = cls(folder, files)
                try:
                    group._limit(limit)
                    return group
                except OSError:  # a folder without control over memory
                    group.remove()
        return None

    def _limit(self, size: int) -> None:
        files = self._files
        (self.folder / files.limit).write_text(str(size))
        with suppress(FileNotFoundError, PermissionError):  # a system that counts no swap
            (self.folder / files.swap).write_text(str(size if files.without_swap is None else files.without_swap))

    def add(self, pid: int) -> None:
        """OSError for a process that has ended, or that this user may not move."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @property
    def peak_bytes(self) -> int | None:
        """The most that the group has held, pages of files included; None where the system does not keep it."""
        try:
            return int((self.folder / self._files.peak).read_text())
        except OSError:
            return None

    @property
    def has_killed(self) -> bool:
        """Whether a process of the group was killed because memory ran out."""
        found = KILLED.search((self.folder / self._files.events).read_text())
        return found is not None and int(found[1]) > 0

    def remove(self) -> None:
        """Remove the group as soon as its processes have ended. Where they do not, the next `make` removes it."""
        deadline = time.monotonic() + EMPTY_S
        while not _removed(self.folder) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()


def _parents() -> Iterator[tuple[Path, Files]]:
    """Where a group may be made: in the cgroup of this process, then in those that it is in. One of version 2 that
    holds processes has no memory control to give away, so that the next one is tried.
    """
    for folder, version in own_groups("memory"):
        yield folder, V1 if version == 1 else V2


def _remove_abandoned(parent: Path) -> None:
    """Remove the groups whose owners have died; the system gives up their locks."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                folder.rmdir()
            finally:
                os.close(lock)


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
