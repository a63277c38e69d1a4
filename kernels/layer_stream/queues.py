"""The two queues that a GPU works on side by side: what it computes, and what it copies from the host's memory.

A mark stands for all that a queue was given before it. The host only gives work and marks: it does not wait for them.
On the CPU, where the same code is tested, all work is done when it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, Protocol

import torch
from torch import Tensor

from labkit.system.errors import UserError

Mark = Any  # a CUDA event, or nanoseconds


class Queues(Protocol):
    """What a stream of layers needs of a device."""

    def mark(self) -> Mark:
        """Behind all that is to be computed so far."""

    def compute_after(self, mark: Mark) -> None:
        """What is to be computed from here on begins after the mark."""

    def copy(self, to: Tensor, data: Tensor, after: Mark) -> tuple[Mark, Mark]:
        """Copies bytes to the device, after a mark and all copies before. Returns marks before and behind the copy."""

    def passed(self, mark: Mark) -> bool:
        """Whether the device is past a mark."""

    def finish(self, mark: Mark) -> None:
        """Returns once the device is past a mark."""

    def finish_copies(self) -> None:
        """Returns once no copy is under way."""

    def times_ns(self, marks: Sequence[Mark]) -> list[int]:
        """When the device passed these marks, as perf_counter_ns. Waits for all work that it was given."""

    def pin(self, memory: Tensor) -> None:
        """Lets the device fetch from this memory of the host by itself, until `unpin`. Raises UserError where the
        system does not allow that.
        """

    def unpin(self, memory: Tensor) -> None: ...


class GpuQueues:
    """A GPU's: the stream that is current when work is given, and a stream of its own for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._copies = device, torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        return self._marked(torch.cuda.current_stream(self._device))

    def compute_after(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def copy(self, to: Tensor, data: Tensor, after: torch.cuda.Event) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        self._copies.wait_event(after)
        begin = self._marked(self._copies)
        with torch.cuda.stream(self._copies):
            to.copy_(data, non_blocking=True)
        return begin, self._marked(self._copies)

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def finish(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def finish_copies(self) -> None:
        self._copies.synchronize()

    def times_ns(self, marks: Sequence[torch.cuda.Event]) -> list[int]:
        torch.cuda.synchronize(self._device)
        latest = self.mark()
        latest.synchronize()
        now = perf_counter_ns()
        return [now - round(mark.elapsed_time(latest) * 1e6) for mark in marks]

    @staticmethod
    def pin(memory: Tensor) -> None:
        # Of torch's own pinned memory every piece is rounded up to a power of two: up to twice what a layer needs.
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if code:
            raise UserError(
                f"{memory.nbytes} bytes of the host's memory can't be pinned for the GPU (CUDA error {code}); free "
                "some, raise the limit of locked memory (ulimit -l), or keep more layers on the GPU"
            )

    @staticmethod
    def unpin(memory: Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    @staticmethod
    def _marked(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


class CpuQueues:
    """The CPU's, on which nothing runs beside anything: a mark is the time at which it was set."""

    def mark(self) -> int:
        return perf_counter_ns()

    def compute_after(self, mark: int) -> None: ...

    def copy(self, to: Tensor, data: Tensor, after: int) -> tuple[int, int]:
        begin = self.mark()
        to.copy_(data)
        return begin, self.mark()

    def passed(self, mark: int) -> bool:
        return True

    def finish(self, mark: int) -> None: ...

    def finish_copies(self) -> None: ...

    def times_ns(self, marks: Sequence[int]) -> list[int]:
        return list(marks)

    def pin(self, memory: Tensor) -> None: ...

    def unpin(self, memory: Tensor) -> None: ...


def queues_of(device: torch.device) -> Queues:
    return GpuQueues(device) if device.type == "cuda" else CpuQueues()
