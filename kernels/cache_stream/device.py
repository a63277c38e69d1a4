"""Keys and values that are offloaded to the host's memory and pass through slots of a GPU, layer by layer, pass after
pass.

A layer is copied to a slot, in the host's order, while the layers before it are computed. At its turn the GPU puts it
into the order and the memory that the kernels use, and afterwards puts the new tokens back into the slot. They are
copied to the host while the next layers are computed. The thread that launches the kernels queues all of that, and
waits for none of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..slot_stream import StreamSpan
from ..slot_stream.queues import DeviceSpans, Mark, Queues
from ..types import LayerCache
from . import CachePass
from .host import WORD, HostCache, TokenShape


class CacheSlots:
    """A GPU's memory for keys and values that are offloaded to the host, for one cache after the other: slots for
    layers in the host's order (`memory`), and `work`, one layer in the kernels' order.
    """

    def __init__(self, queues: Queues, count: int, slot_bytes: int, work: LayerCache) -> None:
        self.queues, self.count, self.work = queues, count, work
        with torch.inference_mode(False):  # because steps write to this memory outside of inference mode
            self.memory = torch.empty(count, slot_bytes, dtype=torch.uint8, device=work.keys.device)
        self.used: list[Mark] = [queues.mark()] * count  # after the last use of each slot

    @property
    def capacity(self) -> int:
        """The number of tokens that fit."""
        return self.work.keys.shape[2]

    def layer(self, index: int, past: int, counter: Tensor | None = None) -> LayerCache:
        """The kernels' layer, which serves all layers in turn."""
        return replace(self.work, past=past, counter=counter)

    def rows(self, slot: int, shape: TokenShape) -> Tensor:
        """uint8 [capacity, token_bytes]: a slot, for a layer of this shape."""
        size = self.capacity * shape.token_bytes
        return self.memory[slot, :size].view(self.capacity, shape.token_bytes)


class DeviceCacheStream:
    """Streams the host's layers through the slots of a GPU. It has the interface of `CacheStream` and is used in the
    same way, by one thread at a time. Between `wait` and `release` of a turn, kernels launched on the current CUDA
    stream may use the result of `layer`.

    A slot's next layer is copied as soon as the slot is released; prefetching goes on into the next pass. Copies run in
    order in each direction, and a copy into a slot waits for the copy out of it. So it comes after all write-backs of
    earlier turns, also after the write-back of its own layer in the previous pass, because there are no more slots than
    layers.
    """

    pass_failed = False

    def __init__(
        self, host: HostCache, slots: CacheSlots, filled: int, spans: DeviceSpans, counter: Tensor | None = None
    ) -> None:
        """filled: tokens of each sequence that are in the host's memory. counter: the number of tokens before a step,
        on the device.
        """
        assert slots.count <= host.layers
        self.host, self.device_slots, self.counter = host, slots, counter
        self.slots = slots.count
        self.blocks_read = self.bytes_read = self.blocks_written = self.bytes_written = 0  # since the beginning
        self._queues, self._spans = slots.queues, spans
        self._written = range(filled, filled)  # tokens written by the latest pass
        self._next = 0  # the next turn to copy
        self._released = 0  # the first turn that is not released yet
        self._end = 0  # the turn after the last one of the pass
        self._filled: list[Mark] = list(slots.used)
        self._begun: Mark = slots.used[0]
        batch, work = host.shape.batch, slots.work
        self._numbers = work.keys[:batch], work.values[:batch]
        self._scales = [scales[:batch] for scales in (work.key_scales, work.value_scales) if scales is not None]

    def begin_pass(self, written: range) -> CachePass:
        """A pass that writes the tokens `written` of every sequence; later tokens do not count as cached."""
        if self._released < self._end:  # the previous pass was left early
            self._start_over()
        self._written, self._end = written, self._released + self.host.layers
        self._copy_ahead()
        return CachePass(self, self._released, written)

    def wait(self, turn: int) -> None:
        """Makes kernels launched after this call find the turn's layer in the kernels' memory."""
        waiting = self._queues.mark()
        self._queues.compute_after(self._filled[turn % self.slots])
        self._begun = self._queues.mark()
        self._spans.add("wait", self._layer(turn), waiting, self._begun)
        for work, slot in self._work_and_slot(turn, range(self._written.start)):
            work.copy_(slot)

    def layer(self, turn: int, past: int) -> LayerCache:
        """The layer of this turn, with `past` tokens in it."""
        keys, values = self._numbers
        return LayerCache(keys, values, past, self.counter, *self._scales)

    def release(self, turn: int, written: range) -> None:
        """Declares that kernels launched after this call do not use the turn's layer. Its tokens `written` are copied
        to the host.
        """
        for work, slot in self._work_and_slot(turn, written):
            slot.copy_(work)
        used, layer = self._queues.mark(), self._layer(turn)
        self._spans.add("compute", layer, self._begun, used)
        target, data = self.host.rows(layer, written), self._rows(turn, written)
        begin, self.device_slots.used[turn % self.slots] = self._queues.copy_back(target, data, used)
        self._spans.add("write", layer, begin, self.device_slots.used[turn % self.slots])
        self.blocks_written += 1
        self.bytes_written += data.nbytes
        self._released = turn + 1
        self._copy_ahead()

    def flush(self) -> None:
        """Returns once all released tokens are in the host's memory."""
        self._queues.finish_copies()

    def note(self, kind: str, layer: int, begin_ns: int, end_ns: int) -> None:
        """Does nothing: work runs later than it is launched, and `take_spans` has the times at which it ran."""

    def take_spans(self) -> list[StreamSpan]:
        """Spans of the device since the last call: "copy", "wait", "compute" and "write" of each layer, the latest
        8,192 at most, sorted by begin. Waits for the device.
        """
        return self._spans.take()

    def check(self) -> None:
        """Does nothing: reads from memory do not fail."""

    def _start_over(self) -> None:
        """Goes on with the first layer, after the prefetched copies, which come after the write-backs."""
        self._next = self._released = self._end
        self.device_slots.used[:] = [self._queues.mark()] * self.slots

    def _copy_ahead(self) -> None:
        """Queues copies of the next layers into slots that are free."""
        while self._next < self._released + self.slots:
            self._copy()
            self._next += 1

    def _copy(self) -> None:
        turn, slot = self._next, self._next % self.slots
        filled = range(self._written.start if turn < self._end else self._written.stop)
        data = self.host.rows(self._layer(turn), filled)
        begin, self._filled[slot] = self._queues.copy(self._rows(turn, filled), data, self.device_slots.used[slot])
        self._spans.add("copy", self._layer(turn), begin, self._filled[slot])
        self.blocks_read += 1
        self.bytes_read += data.nbytes

    def _work_and_slot(self, turn: int, tokens: range) -> list[tuple[Tensor, Tensor]]:
        """Pairs of views of these tokens of keys, values and scales: in the kernels' memory, and in the turn's slot."""
        in_work = (*(numbers.view(WORD) for numbers in self._numbers), *self._scales)
        in_slot = self.host.shape.by_head(self._rows(turn, tokens))
        at = slice(tokens.start, tokens.stop)
        return [(work[:, :, at], slot) for work, slot in zip(in_work, in_slot, strict=True)]

    def _rows(self, turn: int, tokens: range) -> Tensor:
        """uint8 [T, token_bytes]: these tokens in the turn's slot."""
        return self.device_slots.rows(turn % self.slots, self.host.shape)[tokens.start : tokens.stop]

    def _layer(self, turn: int) -> int:
        return turn % self.host.layers
