"""Keys and values that lie in the host's memory and pass through slots of a GPU, layer by layer, pass after pass.

A layer is copied to a slot as it stands in the host's memory while the layers before it are computed. When its turn
comes, the GPU puts it into the place and order that the kernels read, and afterwards what is new back into the slot,
from where it is copied to the host while the next layers are computed. The thread that launches the kernels hands all
of that on, and waits for none of it.
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
    """What a GPU has of keys and values that lie in the host's memory, for one cache after the other: slots for layers
    as they stand there (`memory`), and `work`, one layer for the kernels.
    """

    def __init__(self, queues: Queues, count: int, slot_bytes: int, work: LayerCache) -> None:
        self.queues, self.count, self.work = queues, count, work
        with torch.inference_mode(False):  # steps write to them outside of it
            self.memory = torch.empty(count, slot_bytes, dtype=torch.uint8, device=work.keys.device)
        self.used: list[Mark] = [queues.mark()] * count  # behind what was done with a slot last

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.work.keys.shape[2]

    def layer(self, index: int, past: int, counter: Tensor | None = None) -> LayerCache:
        """What the kernels take for any layer."""
        return replace(self.work, past=past, counter=counter)

    def rows(self, slot: int, shape: TokenShape) -> Tensor:
        """uint8 [capacity, token_bytes]: a slot, for a layer of this shape."""
        size = self.capacity * shape.token_bytes
        return self.memory[slot, :size].view(self.capacity, shape.token_bytes)


class DeviceCacheStream:
    """The layers of the host in the slots of a GPU: the interface of `CacheStream`, used in the same way by one thread
    at a time. Between `wait` and `release` of a turn what `layer` gives may be used by what is launched on the current
    CUDA stream.

    A slot's next layer is copied as soon as it is released, and read ahead into the next pass. Copies go in order in
    each direction. So a copy into a slot, which waits for the one out of it, comes behind all that earlier turns have
    written back, its own layer in the pass before among them: there are no more slots than layers.
    """

    failed = False

    def __init__(
        self, host: HostCache, slots: CacheSlots, held: int, spans: DeviceSpans, counter: Tensor | None = None
    ) -> None:
        """held: tokens of each sequence that are in the host's memory. counter: where the number of tokens before a
        step stands on the device.
        """
        assert slots.count <= host.layers
        self.host, self.device_slots, self.counter = host, slots, counter
        self.slots = slots.count
        self.blocks_read = self.bytes_read = self.blocks_written = self.bytes_written = 0  # since the beginning
        self._queues, self._spans = slots.queues, spans
        self._written = range(held, held)  # by the latest pass
        self._next = self._released = self._end = 0  # the turn to be copied next; turns before this are over; of a pass
        self._filled: list[Mark] = list(slots.used)
        self._begun: Mark = slots.used[0]
        batch, work = host.shape.batch, slots.work
        self._numbers = work.keys[:batch], work.values[:batch]
        self._scales = [each[:batch] for each in (work.key_scales, work.value_scales) if each is not None]

    def begin_pass(self, written: range) -> CachePass:
        """A pass that writes the tokens `written` of every sequence, behind which no more count."""
        if self._released < self._end:  # the pass before was left
            self._start_over()
        self._written, self._end = written, self._released + self.host.layers
        self._copy_ahead()
        return CachePass(self, self._released, written)

    def wait(self, turn: int) -> None:
        """What is launched from here on finds the turn's layer in its place."""
        asked = self._queues.mark()
        self._queues.compute_after(self._filled[turn % self.slots])
        self._begun = self._queues.mark()
        self._spans.add("wait", self._layer(turn), asked, self._begun)
        for place, slot in self._places_and_slot(turn, range(self._written.start)):
            place.copy_(slot)

    def layer(self, turn: int, past: int) -> LayerCache:
        """The layer whose turn it is, with `past` tokens in it."""
        keys, values = self._numbers
        return LayerCache(keys, values, past, self.counter, *self._scales)

    def release(self, turn: int, written: range) -> None:
        """What is launched from here on does not use the turn's layer. Its tokens `written` are copied to the host."""
        for place, slot in self._places_and_slot(turn, written):
            slot.copy_(place)
        used, layer = self._queues.mark(), self._layer(turn)
        self._spans.add("compute", layer, self._begun, used)
        to, data = self.host.rows(layer, written), self._rows(turn, written)
        begin, self.device_slots.used[turn % self.slots] = self._queues.copy_back(to, data, used)
        self._spans.add("write", layer, begin, self.device_slots.used[turn % self.slots])
        self.blocks_written += 1
        self.bytes_written += data.nbytes
        self._released = turn + 1
        self._copy_ahead()

    def flush(self) -> None:
        """Returns once all that was released is in the host's memory."""
        self._queues.finish_copies()

    def note(self, kind: str, layer: int, begin_ns: int, end_ns: int) -> None:
        """Does nothing: the times at which work was launched are not those at which it runs, which `take_spans` has."""

    def take_spans(self) -> list[StreamSpan]:
        """What the device did since the last call: "copy", "wait", "compute" and "write" of each layer, the latest
        8,192 at most; sorted by begin. Waits for the device.
        """
        return self._spans.take()

    def check(self) -> None:
        """There is nothing that could not be read."""

    def _start_over(self) -> None:
        """Goes on with the first layer, behind whatever was copied ahead; that comes behind what was written back."""
        self._next = self._released = self._end
        self.device_slots.used[:] = [self._queues.mark()] * self.slots

    def _copy_ahead(self) -> None:
        """Hands on the copies of the next layers to slots that are no longer needed."""
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

    def _places_and_slot(self, turn: int, tokens: range) -> list[tuple[Tensor, Tensor]]:
        """Where these tokens of keys, values and scales are for the kernels, and where in the turn's slot."""
        places = (*(each.view(WORD) for each in self._numbers), *self._scales)
        in_slot = self.host.shape.by_head(self._rows(turn, tokens))
        at = slice(tokens.start, tokens.stop)
        return [(place[:, :, at], slot) for place, slot in zip(places, in_slot, strict=True)]

    def _rows(self, turn: int, tokens: range) -> Tensor:
        """uint8 [T, token_bytes]: these tokens in the turn's slot."""
        return self.device_slots.rows(turn % self.slots, self.host.shape)[tokens.start : tokens.stop]

    def _layer(self, turn: int) -> int:
        return turn % self.host.layers
