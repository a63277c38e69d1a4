"""Memory limits of a side's processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from labkit.harness.compare.memory_group import MemoryGroup
from labkit.harness.environment import anonymous_memory

LOOK_S = 0.01
WATCHED = "a look at anonymous memory every 10 ms"


class MemoryBudget(Protocol):
    """A memory limit of several processes together."""

    how: str  # what enforces the limit, in words

    @property
    def exceeded(self) -> bool:
        """Whether a process was killed because it exceeded the limit."""

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of all processes together, with the files that they map; None where it is not counted."""


class Watched:
    """A limit enforced by a thread. It kills the processes, each the leader of a session, when their anonymous memory
    has grown by more than `size` bytes. Files that they map do not count.
    """

    how = WATCHED
    peak_bytes = None

    def __init__(self, size: int, pids: Sequence[int]) -> None:
        self.exceeded = False
        self._limit, self._pids = _anonymous(pids) + size, pids
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def end(self) -> None:
        self._over.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            if _anonymous(self._pids) > self._limit:
                self.exceeded = True
                for pid in self._pids:
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                return


@contextmanager
def memory_budget(size: int, pids: Sequence[int]) -> Iterator[MemoryBudget]:
    """Limits the growth of processes to `size` bytes: in a memory cgroup where one can be made, else by watching them.
    The processes must have ended when the context ends.
    """
    if (group := _group(size, pids)) is not None:
        with group:
            yield group
        return
    watched = Watched(size, pids)
    try:
        yield watched
    finally:
        watched.end()


def _group(size: int, pids: Sequence[int]) -> MemoryGroup | None:
    """A memory cgroup that holds all of the processes; None where the system does not allow it."""
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
