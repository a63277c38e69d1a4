"""Memory of this process over time, sampled by a thread."""

from __future__ import annotations

import threading
from time import perf_counter
from types import TracebackType
from typing import Self

from labkit.harness.environment import read_memory
from labkit.harness.streaming.records import MemorySample
from labkit.kernels.memory import return_freed_memory

EVERY_S = 0.05


class MemoryWatch:
    """A context that samples the memory every 50 ms.

    batch: the batch of the samples from now on.
    before: bytes that the process held at the beginning; the samples do not count them.
    """

    def __init__(self) -> None:
        return_freed_memory()
        self.before, self.batch, self.samples = read_memory().now, 0, list[MemorySample]()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="labkit-memory")

    def __enter__(self) -> Self:
        self._begun = perf_counter()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(EVERY_S):
            taken = max(0, read_memory().now - self.before)
            self.samples.append(MemorySample(second=perf_counter() - self._begun, bytes=taken, batch=self.batch))
