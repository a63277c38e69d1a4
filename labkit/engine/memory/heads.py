"""Resident keys and values of all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.engine.memory.stores import HeadStore
from labkit.kernels.int8_cache import SCALE_DTYPE
from labkit.kernels.types import LayerCache, padded_head_dim
from labkit.models.config import ModelConfig


@dataclass(frozen=True)
class StoredHeads(HeadStore):
    """Resident keys and values of each layer, with scales if they are int8."""

    keys: list[Tensor]  # one tensor per layer, [B, Hkv, C, padded D]
    values: list[Tensor]  # one tensor per layer, [B, Hkv, C, padded D]
    key_scales: list[Tensor]  # one tensor per layer, [B, Hkv, C]; empty unless keys are int8
    value_scales: list[Tensor]  # one tensor per layer, [B, Hkv, C]; empty unless values are int8

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
        """Returns room for `capacity` tokens in each of `batch` sequences. layers: None: all layers of the model."""
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
        """All tensors: keys, values and scales."""
        return tuple(tensor for tensors in self._lists for tensor in tensors)

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]

    @property
    def batch(self) -> int:
        return self.keys[0].shape[0]

    def layer(self, index: int, past: int, counter: Tensor | None = None) -> LayerCache:
        """Returns the kernels' view of one layer."""
        scales = (self.key_scales[index], self.value_scales[index]) if self.key_scales else (None, None)
        return LayerCache(self.keys[index], self.values[index], past, counter, *scales)

    def layers_in_order(self, written: range) -> Iterator[LayerCache]:
        return (self.layer(index, written.start) for index in range(len(self.keys)))

    def first(self, batch: int) -> StoredHeads:
        """Returns the first `batch` sequences, in the same memory."""
        return self.part(slice(batch))

    def part(self, rows: slice) -> StoredHeads:
        """Returns a slice of the sequences, in the same memory."""
        return StoredHeads(*([tensor[rows] for tensor in tensors] for tensors in self._lists))

    def copied(self) -> StoredHeads:
        return StoredHeads(*([tensor.clone() for tensor in tensors] for tensors in self._lists))

    def change(self, made_of: Callable[[Tensor], Tensor]) -> None:
        """Replaces each tensor by `made_of(tensor)`, one after the other, so that at most one is in memory twice."""
        for tensors in self._lists:
            for index, tensor in enumerate(tensors):
                tensors[index] = made_of(tensor)

    def join(self, others: Sequence[StoredHeads]) -> None:
        """Appends the sequences of the others. All have the same capacity. Nothing is copied if they lie side by side
        in memory.
        """
        theirs = zip(*(heads.tensors for heads in others), strict=True)
        self.change(lambda tensor: in_one([tensor, *next(theirs)]))

    def grow(self, capacity: int) -> None:
        """Makes room for at least `capacity` tokens. If that fails, `capacity` stays the same."""
        capacity = max(capacity, *(tensor.shape[2] for tensor in self.tensors))  # some may have grown before a failure
        for tensors in reversed(self._lists):
            for index in reversed(range(len(tensors))):  # the tensor that `capacity` refers to comes last
                batch, heads, old, *row = tensors[index].shape
                larger = tensors[index].new_zeros(batch, heads, capacity, *row)
                larger[:, :, :old] = tensors[index]
                tensors[index] = larger

    def take(self, other: StoredHeads, slots: int) -> None:
        """Copies the first `slots` slots of each sequence from `other`, which has the same sequences."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine[:, :, :slots] = theirs[:, :, :slots]


def in_one(parts: Sequence[Tensor]) -> Tensor:
    """Returns the sequences of all parts as one tensor: a view if the parts lie side by side in one memory, else a
    copy.
    """
    first, address = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != address or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(parts))
        address += part.nbytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
