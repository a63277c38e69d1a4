"""Memory cgroups: groups of processes whose memory, including mapped files, Linux limits together."""

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
CGROUP = "a memory cgroup"
NUMBERS = itertools.count()
EMPTY_S = 5.0  # how long the system may take to note that the last process of a group has ended
KILLED = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Files:
    """Names of the files of a memory cgroup in one version of cgroups."""

    limit: str
    swap: str  # set after the limit
    without_swap: int | None  # the value that forbids swap; None: the limit itself, as it counts memory and swap
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
    """A memory cgroup that this process owns. It is a context whose end removes the group, so its processes must have
    ended by then.

    Memory counts from the moment at which a process is added: anonymous memory, and pages of files that it is the
    first to read. At the limit the system drops pages of files; if that is not enough, it kills a process. Nothing is
    swapped.
    """

    how = CGROUP  # the name of what enforces the limit

    def __init__(self, folder: Path, files: Files) -> None:
        """`folder` is a new cgroup."""
        self.folder, self._files = folder, files
        self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @classmethod
    def make(cls, limit: int) -> Self | None:
        """A group with a limit of `limit` bytes: below this process's group, else next to or above it. None: this user
        cannot make a group on this system.

        Also removes groups that killed processes have left.
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
        with suppress(FileNotFoundError, PermissionError):  # this system counts no swap
            (self.folder / files.swap).write_text(str(size if files.without_swap is None else files.without_swap))

    def add(self, pid: int) -> None:
        """Adds a process. OSError: it has ended, or this user may not move it."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @property
    def peak_bytes(self) -> int | None:
        """The group's peak of memory, including pages of files; None if the system does not record it."""
        try:
            return int((self.folder / self._files.peak).read_text())
        except OSError:
            return None

    @property
    def exceeded(self) -> bool:
        """Whether a process of the group was killed because it exceeded the limit."""
        match = KILLED.search((self.folder / self._files.events).read_text())
        return match is not None and int(match[1]) > 0

    def remove(self) -> None:
        """Removes the group as soon as its processes have ended. If they do not end, the next `make` removes it."""
        deadline = time.monotonic() + EMPTY_S
        while not _removed(self.folder) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()


def _parents() -> Iterator[tuple[Path, Files]]:
    """Candidates for the parent of a new group: the cgroup of this process, then its ancestors. A version-2 cgroup that
    holds processes cannot pass memory control on; then the next candidate is tried.
    """
    for folder, version in own_groups("memory"):
        yield folder, V1 if version == 1 else V2


def _remove_abandoned(parent: Path) -> None:
    """Removes the groups of dead owners: the system has released their locks."""
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
