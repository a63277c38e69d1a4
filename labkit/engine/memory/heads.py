"""Keys and values of all layers, as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.kernels.int8_cache import SCALE_DTYPE
from labkit.kernels.slot_stream import StreamSpan
from labkit.kernels.types import LayerCache, padded_head_dim
from labkit.models.config import ModelConfig


@dataclass(frozen=True)
class StoredHeads:
    """Of each layer keys and values [B, Hkv, C, padded D]; beside int8 their scales [B, Hkv, C], else none."""

    keys: list[Tensor]
    values: list[Tensor]
    key_scales: list[Tensor]
    value_scales: list[Tensor]

    @classmethod
    def zeros(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        batch: int,
        capacity: int,
        device: torch.device,
        layers: int | None = None,
    ) -> StoredHeads:
        """Room for `capacity` tokens in each of `batch` sequences. layers: None: as many as the model has."""
        count, slots = layers or config.num_layers, (batch, config.num_kv_heads, capacity)
        row, scaled = padded_head_dim(config.head_dim), count if dtype == torch.int8 else 0

        def tensors(count: int, dtype: torch.dtype, *shape: int) -> list[Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)]

        numbers = (tensors(count, dtype, *slots, row) for _ in range(2))
        return cls(*numbers, *(tensors(scaled, SCALE_DTYPE, *slots) for _ in range(2)))

    @property
    def _lists(self) -> tuple[list[Tensor], ...]:
        return self.keys, self.values, self.key_scales, self.value_scales

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, one after the other."""
        return tuple(tensor for tensors in self._lists for tensor in tensors)

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]

    @property
    def batch(self) -> int:
        return self.keys[0].shape[0]

    def layer(self, index: int, past: int, counter: Tensor | None = None) -> LayerCache:
        """What the kernels take for one layer."""
        scales = (self.key_scales[index], self.value_scales[index]) if self.key_scales else (None, None)
        return LayerCache(self.keys[index], self.values[index], past, counter, *scales)

    @property
    def stream(self) -> None:
        """They do not pass through memory: they stay there."""
        return None

    def take_spans(self) -> list[StreamSpan]:
        """None, for the same reason."""
        return []

    def begin_pass(self, written: range) -> None:
        """A pass over the layers needs nothing to begin with."""

    def in_turn(self, written: range) -> Iterator[LayerCache]:
        return (self.layer(index, written.start) for index in range(len(self.keys)))

    def first(self, batch: int) -> StoredHeads:
        """The first `batch` sequences, in the same memory."""
        return self.part(slice(batch))

    def part(self, rows: slice) -> StoredHeads:
        """Some of the sequences, in the same memory."""
        return StoredHeads(*([tensor[rows] for tensor in tensors] for tensors in self._lists))

    def copied(self) -> StoredHeads:
        return StoredHeads(*([tensor.clone() for tensor in tensors] for tensors in self._lists))

    def change(self, made_of: Callable[[Tensor], Tensor]) -> None:
        """Puts what `made_of` makes of a tensor in its place, one after the other: no more than one is there twice."""
        for tensors in self._lists:
            for index, tensor in enumerate(tensors):
                tensors[index] = made_of(tensor)

    def join(self, others: Sequence[StoredHeads]) -> None:
        """Goes on with the sequences of the others behind these. All have the same capacity. None is copied where they
        lie side by side.
        """
        theirs = zip(*(each.tensors for each in others), strict=True)
        self.change(lambda tensor: in_one([tensor, *next(theirs)]))

    def grow(self, capacity: int) -> None:
        def grown(tensor: Tensor) -> Tensor:
            batch, heads, old, *row = tensor.shape
            larger = tensor.new_zeros(batch, heads, capacity, *row)
            larger[:, :, :old] = tensor
            return larger

        self.change(grown)

    def take(self, other: StoredHeads, slots: int) -> None:
        """Copies the first `slots` slots of the same sequences."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine[:, :, :slots] = theirs[:, :, :slots]


def in_one(parts: Sequence[Tensor]) -> Tensor:
    """The sequences of all parts: where they lie, if that is side by side in one memory, else copied."""
    first, place = parts[0], parts[0].data_ptr()
    for each in parts:
        if each.data_ptr() != place or each.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(parts))
        place += each.nbytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
