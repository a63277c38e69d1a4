"""How much memory the processes of a side may take, and what holds them to it."""

from __future__ import annotations

import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from labkit.harness.environment import anonymous_memory
from labkit.system.memory_group import MemoryGroup

LOOK_S = 0.01
CGROUP, WATCHED = "a memory cgroup", "a look at anonymous memory every 10 ms"


class MemoryBudget(ABC):
    """how: what holds the processes to their memory, in words."""

    how: str

    @property
    @abstractmethod
    def exceeded(self) -> bool:
        """Whether a process was killed because there was not enough memory."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int | None:
        """The most that all processes have held together, files that they map included; None where nobody counts it."""


class InGroup(MemoryBudget):
    """The limit counts every page that a process is the first to touch, of files too."""

    how = CGROUP

    def __init__(self, group: MemoryGroup) -> None:
        self._group = group

    @property
    def exceeded(self) -> bool:
        return self._group.has_killed

    @property
    def peak_bytes(self) -> int | None:
        return self._group.peak_bytes


class Watched(MemoryBudget):
    """Processes, each the leader of a session, are killed when their anonymous memory exceeds what they have now and
    the budget. Files that they map escape.
    """

    how = WATCHED

    def __init__(self, size: int, pids: Sequence[int]) -> None:
        self._exceeded = False
        self._limit, self._pids = _anonymous(pids) + size, pids
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    @property
    def exceeded(self) -> bool:
        return self._exceeded

    @property
    def peak_bytes(self) -> int | None:
        return None

    def end(self) -> None:
        self._over.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            if _anonymous(self._pids) > self._limit:
                self._exceeded = True
                for pid in self._pids:
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                return


@contextmanager
def memory_budget(size: int, pids: Sequence[int]) -> Iterator[MemoryBudget]:
    """Holds processes to `size` bytes beyond what they have now, until the context ends, by which time they must have
    ended: in a memory cgroup where one can be made, else by watching them.
    """
    if (group := _group(size, pids)) is not None:
        with group:
            yield InGroup(group)
        return
    watched = Watched(size, pids)
    try:
        yield watched
    finally:
        watched.end()


def _group(size: int, pids: Sequence[int]) -> MemoryGroup | None:
    """A group with all of the processes in it; None where they cannot be put there."""
    group = MemoryGroup.make(size)
    if group is None:
        return None
    try:
        for pid in pids:
            group.add(pid)
    except OSError:
        group.remove()
        return None
    return group


def _anonymous(pids: Sequence[int]) -> int:
    return sum(anonymous_memory(pid) for pid in pids)
