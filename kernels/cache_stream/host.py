"""Backing store of offloaded keys and values in the host's memory, for a GPU that has a few layers at a time.

A layer is stored token by token. So its filled tokens are one piece of memory and its new tokens another: each crosses
the link as one copy. The GPU transposes them, because its memory is far faster than the link.

B batch, H KV heads, D padded head_dim, T tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from labkit.system.rounding import round_up

from ..int8_cache import SCALE_DTYPE
from ..memory import reserved
from ..slot_stream.queues import Queues

WORD = torch.int64  # unit in which numbers of any type are moved: D numbers are always whole words


@dataclass(frozen=True)
class TokenShape:
    """The shape of one token in a layer: keys and values [B, H, D] of `dtype`; int8 has scales [B, H] too."""

    batch: int
    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a token of all sequences, in one layer."""
        return round_up(sum(self._section_bytes), WORD.itemsize)

    @property
    def _section_bytes(self) -> tuple[int, ...]:
        rows = self.batch * self.heads
        numbers, scales = rows * self.dim * self.dtype.itemsize, rows * SCALE_DTYPE.itemsize
        return (numbers, numbers, scales, scales) if self.dtype == torch.int8 else (numbers, numbers)

    def sections(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Views of uint8 [T, token_bytes], one for keys, values, and each of their scales: uint8 [T, B, bytes]."""
        sizes = self._section_bytes
        ends = [sum(sizes[: count + 1]) for count in range(len(sizes))]
        return tuple(
            rows[:, end - size : end].unflatten(1, (self.batch, -1)) for size, end in zip(sizes, ends, strict=True)
        )

    def by_head(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The same views in the kernels' order: words [B, H, T, D in words], and scales [B, H, T]."""
        keys, values, *scales = self.sections(rows)
        words = (numbers.view(WORD).unflatten(2, (self.heads, -1)).permute(1, 2, 0, 3) for numbers in (keys, values))
        return (*words, *(scale.view(SCALE_DTYPE).permute(1, 2, 0) for scale in scales))


class HostCache:
    """Keys and values of all layers, zeros at first. The memory of each layer is pinned while this object lives."""

    def __init__(self, queues: Queues, shape: TokenShape, layers: int, capacity: int) -> None:
        """Raises UserError if the system allows no more pinned memory."""
        self.shape, self._queues = shape, queues
        self._layers: list[Tensor] = []
        self.close = weakref.finalize(self, _closed, queues, self._layers)
        for _ in range(layers):
            self._layers.append(self._pinned(capacity))

    @property
    def layers(self) -> int:
        return len(self._layers)

    @property
    def capacity(self) -> int:
        """The number of tokens of each sequence that every layer has room for."""
        return min(len(layer) for layer in self._layers)

    @property
    def bytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self._layers)

    def rows(self, layer: int, tokens: range) -> Tensor:
        """uint8 [T, token_bytes]: these tokens of a layer."""
        return self._layers[layer][tokens.start : tokens.stop]

    def grow(self, capacity: int, filled: int) -> None:
        """Makes room for `capacity` tokens, layer by layer; the first `filled` stay. Raises UserError if that fails:
        nothing is lost then, and `capacity` stays the same.
        """
        self._queues.finish_copies()
        for index, old in enumerate(self._layers):
            if len(old) < capacity:
                larger = self._pinned(capacity)
                larger[:filled] = old[:filled]
                self._layers[index] = larger
                self._queues.unpin(old)

    def select(self, rows: Tensor, filled: int) -> HostCache:
        """A cache of the sequences `rows` (int64 indices), with `filled` cached tokens each: this object if the number
        of sequences stays the same, else a new one.
        """
        if len(rows) != self.shape.batch:
            return self.copied(rows, filled)
        self._queues.finish_copies()
        if not torch.equal(rows, torch.arange(len(rows))):
            for layer in self._layers:
                for section in self.shape.sections(layer[:filled]):
                    section.copy_(section.index_select(1, rows))
        return self

    def copied(self, rows: Tensor, filled: int) -> HostCache:
        """A new cache of the sequences `rows`, with `filled` tokens each. Raises UserError as the constructor."""
        shape = replace(self.shape, batch=len(rows))
        new = HostCache(self._queues, shape, self.layers, self.capacity)
        self._queues.finish_copies()
        for source, target in zip(self._layers, new._layers, strict=True):
            _copy_rows(self.shape, source[:filled], shape, target[:filled], rows)
        return new

    def shrink(self, rows: Tensor, filled: int) -> None:
        """Keeps only the sequences `rows`, no more than before, with `filled` cached tokens each. Goes layer by layer,
        so it needs room for one more layer. Raises UserError without that room; everything is lost then. A cache
        without sequences has no memory, and must not be used again.
        """
        shape, capacity = self.shape, self.capacity
        self.shape = replace(shape, batch=len(rows))
        if self.shape.batch == 0:
            _closed(self._queues, self._layers)
            self._layers.clear()
            return
        self._queues.finish_copies()
        for index, old in enumerate(self._layers):
            new = self._pinned(capacity)
            _copy_rows(shape, old[:filled], self.shape, new[:filled], rows)
            self._layers[index] = new
            self._queues.unpin(old)

    def _pinned(self, capacity: int) -> Tensor:
        with torch.inference_mode(False):  # because steps write to this memory outside of inference mode
            memory = reserved(capacity * self.shape.token_bytes).view(capacity, self.shape.token_bytes)
        self._queues.pin(memory)
        return memory


def _copy_rows(shape: TokenShape, source: Tensor, new_shape: TokenShape, target: Tensor, rows: Tensor) -> None:
    """Copies the sequences `rows` of a layer. source, target: uint8 [T, token_bytes] of their shapes."""
    for old, new in zip(shape.sections(source), new_shape.sections(target), strict=True):
        new.copy_(old.index_select(1, rows))


def _closed(queues: Queues, pinned: Sequence[Tensor]) -> None:
    """Waits for the copies that read or write the host's memory, then unpins it."""
    queues.finish_copies()
    for memory in pinned:
        queues.unpin(memory)
