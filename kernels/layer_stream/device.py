"""Layers that are copied from the host's memory ahead of their use, pass after pass, into a few slots on a GPU.

The host's memory holds all of them, or is itself filled from a file (`LayerStream`). The thread that launches the
kernels hands the copies on, too: a copy waits on the GPU for the kernels that read its slot before, and kernels wait on
the GPU for their copy. The host waits for nothing but the file.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..memory import reserved
from ..slot_stream.queues import DeviceSpans, Mark, Queues, queues_of
from . import Block, StreamSpan


class HostBlocks(Protocol):
    """Where blocks come from: `LayerStream` or `HeldBlocks`. For the calls see `LayerStream`."""

    slots: int
    slot_bytes: int
    blocks: tuple[Block, ...]

    @property
    def path(self) -> Path | None: ...

    @property
    def close(self) -> Callable[[], object]: ...

    @property
    def failed(self) -> bool: ...

    @property
    def read_s(self) -> float: ...

    def begin_pass(self) -> int: ...

    def wait(self, turn: int) -> None: ...

    def filled(self, turn: int) -> bool: ...

    def memory(self, turn: int) -> Tensor: ...

    def release(self, turn: int) -> None: ...

    def check(self) -> None: ...

    def take_spans(self) -> list[StreamSpan]: ...


class HeldBlocks:
    """Blocks of one size that the host's memory holds, all of them. `memory` of a block's number is filled by whoever
    made this.
    """

    path, failed, read_s = None, False, 0.0

    def __init__(self, layers: Sequence[int], block_bytes: int) -> None:
        """block_bytes: of each layer."""
        self.blocks = tuple(Block(layer, at * block_bytes, block_bytes) for at, layer in enumerate(layers))
        self.slots, self.slot_bytes = len(layers), block_bytes
        self._memory = reserved(self.slots * block_bytes)
        self._next = 0

    def begin_pass(self) -> int:
        self._next = -(-self._next // self.slots) * self.slots
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


class UnderWay(NamedTuple):
    """A copy that was handed on, and the mark behind it."""

    turn: int
    end: Mark


class DeviceStream:
    """The blocks of the host in `slots` pieces of a GPU's memory: the interface of `LayerStream`, used in the same way
    by one thread at a time. The host's memory is pinned by `pin`. Between `wait` and `release` of a turn its slot may
    be read by what is launched on the current CUDA stream.

    A slot's next block is copied as soon as it is released, and read ahead into the next pass. A pass whose blocks
    can't be read goes on, with no longer waiting, and `check` tells.
    """

    def __init__(self, host: HostBlocks, slots: int, device: torch.device, queues: Queues | None = None) -> None:
        self.host, self.slots, self.path = host, slots, host.path
        self.blocks, self.slot_bytes = host.blocks, host.slot_bytes
        self.blocks_read = self.bytes_read = 0  # that have been copied to the device, since the beginning
        self._queues = queues or queues_of(device)
        self._pinned: list[Tensor] = []
        self.close = weakref.finalize(self, _closed, self._queues, host, self._pinned)
        with torch.inference_mode(False):  # steps write to them outside of it
            self._memory = torch.empty(slots * self.slot_bytes, dtype=torch.uint8, device=device)
        self._next = self._released = 0  # the turn to be copied next; turns before this one are over
        self._used: list[Mark] = [self._queues.mark()] * slots  # behind the kernels that read a slot last
        self._filled: list[Mark] = list(self._used)
        self._under_way: deque[UnderWay] = deque()
        self._spans = DeviceSpans(self._queues)
        self._begun: Mark = self._used[0]

    def pin(self, memory: Tensor) -> None:
        """Lets the device fetch from this memory of the host beside its work, until the stream's end: for memory that
        is not pinned the host waits. Raises UserError where the system does not allow that.
        """
        self._queues.pin(memory)
        self._pinned.append(memory)

    def memory(self, turn: int) -> Tensor:
        """uint8 [slot_bytes] on the device: the slot of a turn."""
        begin = turn % self.slots * self.slot_bytes
        return self._memory[begin : begin + self.slot_bytes]

    def begin_pass(self) -> int:
        """The turn of the first block in a new pass."""
        if self._released % len(self.blocks) or self.host.failed:  # the pass before was left, or worth nothing
            self._start_over()
        self._copy_ahead()
        return self._released

    def wait(self, turn: int) -> None:
        """What is launched from here on finds the turn's slot filled, unless the pass has failed."""
        asked = self._queues.mark()
        while self._next <= turn and not self.host.failed:
            self._hand_back(before=self._next - self.host.slots + 1)
            self.host.wait(self._next)
            if not self.host.failed:
                self._copy()
        self._queues.compute_after(self._filled[turn % self.slots])
        self._begun = self._queues.mark()
        self._spans.add("wait", self._layer(turn), asked, self._begun)
        self._copy_ahead()

    def release(self, turn: int) -> None:
        """What is launched from here on does not read the turn's slot."""
        used = self._queues.mark()
        self._spans.add("compute", self._layer(turn), self._begun, used)
        self._used[turn % self.slots] = used
        self._released = turn + 1
        self._copy_ahead()

    def note(self, kind: str, layer: int, begin_ns: int, end_ns: int) -> None:
        """Does nothing: the times at which work was launched are not those at which it runs, which `take_spans` has."""

    def take_spans(self) -> list[StreamSpan]:
        """What the device did since the last call, the latest 8,192 at most, with what was read from a file; sorted by
        begin. Waits for the device.
        """
        return sorted(self.host.take_spans() + self._spans.take(), key=lambda span: span.begin_ns)

    @property
    def read_s(self) -> float:
        """Seconds that were spent reading a file, of those since the beginning."""
        return self.host.read_s

    @property
    def failed(self) -> bool:
        """Whether a block of this pass could not be read."""
        return self.host.failed

    def check(self) -> None:
        """Raises RunError where a block of this pass could not be read: what was computed with it is worth nothing."""
        self.host.check()

    def _start_over(self) -> None:
        """Goes on with the first block, whatever was copied or read ahead."""
        self._hand_back(before=self._next)
        self._next = self._released = self.host.begin_pass()
        self._used = [self._queues.mark()] * self.slots

    def _copy_ahead(self) -> None:
        """Hands on the copies of all blocks that the host has, to slots that are no longer needed."""
        while self._under_way and self._queues.passed(self._under_way[0].end):
            self.host.release(self._under_way.popleft().turn)
        while self._next < self._released + self.slots and self.host.filled(self._next):
            self._copy()

    def _copy(self) -> None:
        turn, slot = self._next, self._next % self.slots
        size = self.blocks[turn % len(self.blocks)].bytes
        to, data = self.memory(turn)[:size], self.host.memory(turn)[:size]
        begin, end = self._queues.copy(to, data, self._used[slot])
        self._filled[slot] = end
        self._under_way.append(UnderWay(turn, end))
        self._spans.add("copy", self._layer(turn), begin, end)
        self._next += 1
        self.blocks_read += 1
        self.bytes_read += size

    def _hand_back(self, before: int) -> None:
        """Waits until the blocks of the turns before this one are copied: the host may put others in their place."""
        while self._under_way and self._under_way[0].turn < before:
            copied = self._under_way.popleft()
            self._queues.finish(copied.end)
            self.host.release(copied.turn)

    def _layer(self, turn: int) -> int:
        return self.blocks[turn % len(self.blocks)].layer


def _closed(queues: Queues, host: HostBlocks, pinned: list[Tensor]) -> None:
    """Lets the copies end that read the host's memory, before that is gone."""
    queues.finish_copies()
    host.close()
    for memory in pinned:
        queues.unpin(memory)
