"""The three queues that a GPU works on in parallel: kernels, copies from the host's memory, and copies to it.

A mark is a point in a queue, after all work that was queued before it. The host only queues work and marks, and does
not wait for them. On the CPU, where the same code is tested, all work is done when it is queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from labkit.system.errors import UserError

from . import StreamSpan

MOST_PENDING = 8192  # spans that are kept until they are taken: each holds two events of the GPU
Mark = Any  # a CUDA event, or nanoseconds


class Queues(Protocol):
    """A device's queues, for streams of layers and of keys and values. All streams of an engine share them, so that
    copies to the device arrive in the order of their use.
    """

    def mark(self) -> Mark:
        """A mark after all kernels queued so far."""

    def compute_after(self, mark: Mark) -> None:
        """Makes kernels queued after this call wait for the mark."""

    def copy(self, to: Tensor, data: Tensor, after: Mark) -> tuple[Mark, Mark]:
        """Copies bytes to the device, after a mark and all earlier copies to the device. Returns marks before and after
        the copy.
        """

    def copy_back(self, to: Tensor, data: Tensor, after: Mark) -> tuple[Mark, Mark]:
        """Copies bytes to the host in the same way, in parallel with copies to the device."""

    def passed(self, mark: Mark) -> bool:
        """Whether the device is past a mark."""

    def finish(self, mark: Mark) -> None:
        """Returns once the device is past a mark."""

    def finish_copies(self) -> None:
        """Returns once no copy is in flight in either direction."""

    def times_ns(self, marks: Sequence[Mark]) -> list[int]:
        """The times at which the device passed these marks, as perf_counter_ns. Waits for all queued work."""

    def pin(self, memory: Tensor) -> None:
        """Pins this memory of the host until `unpin`, so that the device copies from it by itself. Raises UserError if
        the system does not allow that.
        """

    def unpin(self, memory: Tensor) -> None: ...


class GpuQueues:
    """The queues of a GPU: the stream that is current when work is queued, and one more stream for each direction of
    copies, created for the first copy.

    Tensors to copy must be contiguous: of others torch makes a copy in memory that is not pinned, and waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {}  # by the direction of their copies

    def mark(self) -> torch.cuda.Event:
        return self._marked(torch.cuda.current_stream(self._device))

    def compute_after(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def copy(self, to: Tensor, data: Tensor, after: torch.cuda.Event) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return self._copied("inward", to, data, after)

    def copy_back(self, to: Tensor, data: Tensor, after: torch.cuda.Event) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return self._copied("outward", to, data, after)

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def finish(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def finish_copies(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def times_ns(self, marks: Sequence[torch.cuda.Event]) -> list[int]:
        torch.cuda.synchronize(self._device)
        latest = self.mark()
        latest.synchronize()
        now = perf_counter_ns()
        return [now - round(mark.elapsed_time(latest) * 1e6) for mark in marks]

    @staticmethod
    def pin(memory: Tensor) -> None:
        # torch's own pinned memory rounds every piece up to a power of two, up to twice the bytes of a layer.
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if code:
            raise UserError(
                f"{memory.nbytes} bytes of the host's memory can't be pinned for the GPU (CUDA error {code}); free "
                "some, raise the limit of locked memory (ulimit -l), or keep more on the GPU"
            )

    @staticmethod
    def unpin(memory: Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def _copied(
        self, direction: str, to: Tensor, data: Tensor, after: torch.cuda.Event
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        if direction not in self._streams:
            self._streams[direction] = torch.cuda.Stream(self._device)
        stream = self._streams[direction]
        stream.wait_event(after)
        begin = self._marked(stream)
        with torch.cuda.stream(stream):
            to.copy_(data, non_blocking=True)
        return begin, self._marked(stream)

    @staticmethod
    def _marked(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


class CpuQueues:
    """The queues of the CPU, which does one thing at a time: a mark is the time at which it was set."""

    def mark(self) -> int:
        return perf_counter_ns()

    def compute_after(self, mark: int) -> None: ...

    def copy(self, to: Tensor, data: Tensor, after: int) -> tuple[int, int]:
        return self._copied(to, data)

    def copy_back(self, to: Tensor, data: Tensor, after: int) -> tuple[int, int]:
        return self._copied(to, data)

    def passed(self, mark: int) -> bool:
        return True

    def finish(self, mark: int) -> None: ...

    def finish_copies(self) -> None: ...

    def times_ns(self, marks: Sequence[int]) -> list[int]:
        return list(marks)

    def pin(self, memory: Tensor) -> None: ...

    def unpin(self, memory: Tensor) -> None: ...

    def _copied(self, to: Tensor, data: Tensor) -> tuple[int, int]:
        begin = self.mark()
        to.copy_(data)
        return begin, self.mark()


def queues_of(device: torch.device) -> Queues:
    return GpuQueues(device) if device.type == "cuda" else CpuQueues()


class PendingSpan(NamedTuple):
    kind: str
    layer: int
    begin: Mark
    end: Mark


class DeviceSpans:
    """Spans of a device's work between marks, the latest 8,192 at most."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._pending: deque[PendingSpan] = deque(maxlen=MOST_PENDING)

    def add(self, kind: str, layer: int, begin: Mark, end: Mark) -> None:
        self._pending.append(PendingSpan(kind, layer, begin, end))

    def take(self) -> list[StreamSpan]:
        """The spans since the last call, sorted by begin. Waits for the device."""
        pending = list(self._pending)
        self._pending.clear()
        times = self._queues.times_ns([mark for span in pending for mark in (span.begin, span.end)])
        spans = [
            StreamSpan(span.kind, span.layer, begin, end)
            for span, begin, end in zip(pending, times[::2], times[1::2], strict=True)
        ]
        return sorted(spans, key=lambda span: span.begin_ns)
