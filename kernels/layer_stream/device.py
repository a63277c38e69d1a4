"""Layers that are prefetched from the host's memory into a few slots on a GPU, pass after pass.

The host's memory holds all of them, or is itself filled from a file (`LayerStream`). The thread that launches the
kernels also queues the copies. On the GPU a copy waits for the kernels that read its slot before, and kernels wait for
their copy. The host waits only for the file.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from labkit.system.rounding import round_up

from ..memory import reserved
from ..slot_stream.queues import DeviceSpans, Mark, Queues, queues_of
from . import Block, LayerStream, StreamSpan


class HeldBlocks:
    """Blocks of one size, all in the host's memory, with the interface of `LayerStream`. The creator fills
    `memory(number)` of each block.
    """

    path, failed, read_s = None, False, 0.0

    def __init__(self, layers: Sequence[int], block_bytes: int) -> None:
        """block_bytes: bytes of each layer."""
        self.blocks = tuple(Block(layer, at * block_bytes, block_bytes) for at, layer in enumerate(layers))
        self.slots, self.slot_bytes = len(layers), block_bytes
        self._memory = reserved(self.slots * block_bytes)
        self._next = 0

    def begin_pass(self) -> int:
        self._next = round_up(self._next, self.slots)
        return self._next

    def wait(self, turn: int) -> None: ...

    def filled(self, turn: int) -> bool:
        return True

    def memory(self, turn: int) -> Tensor:
        begin = turn % self.slots * self.slot_bytes
        return self._memory[begin : begin + self.slot_bytes]

    def release(self, turn: int) -> None:
        self._next = turn + 1

    def check(self) -> None: ...

    def take_spans(self) -> list[StreamSpan]:
        return []

    def close(self) -> None: ...


HostBlocks: TypeAlias = LayerStream | HeldBlocks  # the host's source of blocks


class UnderWay(NamedTuple):
    """A queued copy, and the mark after it."""

    turn: int
    end: Mark


class DeviceStream:
    """Streams the host's blocks through `slots` pieces of a GPU's memory. It has the interface of `LayerStream` and is
    used in the same way, by one thread at a time. `pin` pins the host's memory. Between `wait` and `release` of a turn,
    kernels launched on the current CUDA stream may read its slot.

    A slot's next block is copied as soon as the slot is released; prefetching goes on into the next pass. A pass with
    blocks that can't be read goes on without waiting, and `check` raises the error.
    """

    def __init__(self, host: HostBlocks, slots: int, device: torch.device, queues: Queues | None = None) -> None:
        self.host, self.slots, self.path = host, slots, host.path
        self.blocks, self.slot_bytes = host.blocks, host.slot_bytes
        self.blocks_read = self.bytes_read = 0  # copied to the device since the beginning
        self._queues = queues or queues_of(device)
        self._pinned: list[Tensor] = []
        self.close = weakref.finalize(self, _closed, self._queues, host, self._pinned)
        with torch.inference_mode(False):  # because steps write to this memory outside of inference mode
            self._memory = torch.empty(slots * self.slot_bytes, dtype=torch.uint8, device=device)
        self._next = 0  # the next turn to copy
        self._released = 0  # the first turn that is not released yet
        self._used: list[Mark] = [self._queues.mark()] * slots  # after the last kernels that read each slot
        self._filled: list[Mark] = list(self._used)
        self._under_way: deque[UnderWay] = deque()
        self._spans = DeviceSpans(self._queues)
        self._begun: Mark = self._used[0]

    def pin(self, memory: Tensor) -> None:
        """Pins this memory of the host until the stream's end, so that the device copies from it while it computes.
        Copies from other memory make the host wait. Raises UserError if the system does not allow that.
        """
        self._queues.pin(memory)
        self._pinned.append(memory)

    def memory(self, turn: int) -> Tensor:
        """uint8 [slot_bytes] on the device: the slot of a turn."""
        begin = turn % self.slots * self.slot_bytes
        return self._memory[begin : begin + self.slot_bytes]

    def begin_pass(self) -> int:
        """The turn of the first block in a new pass."""
        if self._released % len(self.blocks) or self.host.failed:  # the previous pass was left early, or has failed
            self._start_over()
        self._copy_ahead()
        return self._released

    def wait(self, turn: int) -> None:
        """Makes kernels launched after this call find the turn's slot filled, unless the pass has failed."""
        waiting = self._queues.mark()
        while self._next <= turn and not self.host.failed:
            self._hand_back(before=self._next - self.host.slots + 1)
            self.host.wait(self._next)
            if not self.host.failed:
                self._copy()
        self._queues.compute_after(self._filled[turn % self.slots])
        self._begun = self._queues.mark()
        self._spans.add("wait", self._layer(turn), waiting, self._begun)
        self._copy_ahead()

    def release(self, turn: int) -> None:
        """Declares that kernels launched after this call do not read the turn's slot."""
        used = self._queues.mark()
        self._spans.add("compute", self._layer(turn), self._begun, used)
        self._used[turn % self.slots] = used
        self._released = turn + 1
        self._copy_ahead()

    def note(self, kind: str, layer: int, begin_ns: int, end_ns: int) -> None:
        """Does nothing: work runs later than it is launched, and `take_spans` has the times at which it ran."""

    def take_spans(self) -> list[StreamSpan]:
        """Spans of the device since the last call, the latest 8,192 at most, and spans of reading a file, sorted by
        begin. Waits for the device.
        """
        return sorted(self.host.take_spans() + self._spans.take(), key=lambda span: span.begin_ns)

    @property
    def read_s(self) -> float:
        """Seconds spent reading a file since the beginning."""
        return self.host.read_s

    @property
    def pass_failed(self) -> bool:
        """Whether a block could not be read, perhaps one of the next pass."""
        return self.host.failed

    def check(self) -> None:
        """Raises RunError if a block of this pass could not be read: results computed with it are invalid."""
        self.host.check()

    def _start_over(self) -> None:
        """Goes on with the first block, and drops prefetched blocks."""
        self._hand_back(before=self._next)
        self._next = self._released = self.host.begin_pass()
        self._used = [self._queues.mark()] * self.slots

    def _copy_ahead(self) -> None:
        """Queues copies of all blocks that the host has into slots that are free."""
        while self._under_way and self._queues.passed(self._under_way[0].end):
            self.host.release(self._under_way.popleft().turn)
        while self._next < self._released + self.slots and self.host.filled(self._next):
            self._copy()

    def _copy(self) -> None:
        turn, slot = self._next, self._next % self.slots
        size = self.blocks[turn % len(self.blocks)].bytes
        target, data = self.memory(turn)[:size], self.host.memory(turn)[:size]
        begin, end = self._queues.copy(target, data, self._used[slot])
        self._filled[slot] = end
        self._under_way.append(UnderWay(turn, end))
        self._spans.add("copy", self._layer(turn), begin, end)
        self._next += 1
        self.blocks_read += 1
        self.bytes_read += size

    def _hand_back(self, before: int) -> None:
        """Waits until the blocks of the turns before `before` are copied. Then the host may replace them."""
        while self._under_way and self._under_way[0].turn < before:
            copied = self._under_way.popleft()
            self._queues.finish(copied.end)
            self.host.release(copied.turn)

    def _layer(self, turn: int) -> int:
        return self.blocks[turn % len(self.blocks)].layer


def _closed(queues: Queues, host: HostBlocks, pinned: list[Tensor]) -> None:
    """Waits for the copies that read the host's memory, then closes its source and unpins it."""
    queues.finish_copies()
    host.close()
    for memory in pinned:
        queues.unpin(memory)
