"""A simulated GPU with three queues, which advance when a seeded generator says so, or when they must."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class PlayedMark:
    """A place in a queue. It is passed when all work before it is done."""

    passed = False


class PlayedGpu:
    """Three queues of work, which is done only while the host polls or waits."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.computing: deque[Any] = deque()  # entries: work to do, a mark to wait for, or a mark to set
        self.copying: deque[Any] = deque()
        self.returning: deque[Any] = deque()
        self.at_work = False  # whether the GPU is doing work, not the host

    def mark(self) -> PlayedMark:
        return self._marked(self.computing)

    def compute(self, work: Callable[[], None]) -> None:
        self.computing.append(("do", work))

    def compute_after(self, mark: PlayedMark) -> None:
        self.computing.append(("wait", mark))

    def copy(self, to: Tensor, data: Tensor, after: PlayedMark) -> tuple[PlayedMark, PlayedMark]:
        return self._copied(self.copying, to, data, after)

    def copy_back(self, to: Tensor, data: Tensor, after: PlayedMark) -> tuple[PlayedMark, PlayedMark]:
        return self._copied(self.returning, to, data, after)

    def passed(self, mark: PlayedMark) -> bool:
        for _ in range(self.random.choice((0, 0, 1, 2, 5, 20))):
            self._go_on()
        return mark.passed

    def finish(self, mark: PlayedMark) -> None:
        while not mark.passed:
            assert self._go_on(), "the queues wait for each other"

    def finish_all(self) -> None:
        while self._go_on():
            pass
        assert not self.computing
        assert not self.copying
        assert not self.returning

    def finish_copies(self) -> None:
        self.finish_queue(self.copying)
        self.finish_queue(self.returning)

    def finish_queue(self, queue: deque[Any]) -> None:
        while queue:
            assert self._go_on(), "the queues wait for each other"

    def times_ns(self, marks: Sequence[PlayedMark]) -> list[int]:
        return [0] * len(marks)

    def pin(self, memory: Tensor) -> None: ...

    def unpin(self, memory: Tensor) -> None: ...

    def _copied(self, queue: deque[Any], to: Tensor, data: Tensor, after: PlayedMark) -> tuple[PlayedMark, PlayedMark]:
        queue.append(("wait", after))
        begin = self._marked(queue)
        half = len(data) // 2
        for part in (slice(half), slice(half, None)):  # a reader that does not wait sees half of the copy
            queue.append(("do", lambda part=part: to[part].copy_(data[part])))
        return begin, self._marked(queue)

    def _marked(self, queue: deque[Any]) -> PlayedMark:
        mark = PlayedMark()
        queue.append(("pass", mark))
        return mark

    def _go_on(self) -> bool:
        """Does the next piece of work of a queue that is not blocked; False if all are blocked or empty."""
        queues = (self.computing, self.copying, self.returning)
        ready = [queue for queue in queues if queue and (queue[0][0] != "wait" or queue[0][1].passed)]
        if not ready:
            return False
        kind, item = self.random.choice(ready).popleft()
        if kind == "do":
            self.at_work = True
            item()
            self.at_work = False
        elif kind == "pass":
            item.passed = True
        return True


class PlayedEvent(PlayedMark):
    """A CUDA event of the simulated GPU `played`."""

    played: PlayedGpu

    def __init__(self, enable_timing: bool) -> None:
        pass

    def record(self, stream: "PlayedStream") -> None:
        stream.queue.append(("pass", self))

    def query(self) -> bool:
        return self.played.passed(self)

    def synchronize(self) -> None:
        self.played.finish(self)


class PlayedStream:
    """A CUDA stream: one of the queues of a simulated GPU."""

    def __init__(self, gpu: PlayedGpu, queue: deque[Any]) -> None:
        self.gpu, self.queue = gpu, queue

    def wait_event(self, event: PlayedEvent) -> None:
        self.queue.append(("wait", event))

    def synchronize(self) -> None:
        self.gpu.finish_queue(self.queue)


class PlayedKernels(TorchFunctionMode):
    """Context that queues copies within the memory of a simulated GPU as work of its compute queue."""

    def __init__(self, gpu: PlayedGpu, memory: Sequence[Tensor]) -> None:
        super().__init__()
        self.gpu, self.memory = gpu, {_storage(tensor) for tensor in memory}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and not self.gpu.at_work and {_storage(tensor) for tensor in args[:2]} <= self.memory:
            to, data = args
            self.gpu.compute(lambda: to.copy_(data))
            return to
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class PlayedCuda(TorchFunctionMode):
    """torch.cuda on a simulated GPU: non-blocking copies go into the queue of the current stream."""

    def __init__(self, gpu: PlayedGpu, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.current = PlayedStream(gpu, gpu.computing)
        copy_queues = iter((gpu.copying, gpu.returning))  # in the order in which streams are created
        patch.setattr(torch.cuda, "Event", type("Event", (PlayedEvent,), {"played": gpu}))
        patch.setattr(torch.cuda, "Stream", lambda device: PlayedStream(gpu, next(copy_queues)))
        patch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        patch.setattr(torch.cuda, "stream", self.within)
        runtime = SimpleNamespace(cudaHostRegister=lambda *memory: 0, cudaHostUnregister=lambda *memory: 0)
        patch.setattr(torch.cuda, "cudart", lambda: runtime)

    @contextmanager
    def within(self, stream: PlayedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and kwargs and kwargs.get("non_blocking"):
            to, data = args
            self.current.queue.append(("do", lambda: to.copy_(data)))
            return to
        return func(*args, **(kwargs or {}))
