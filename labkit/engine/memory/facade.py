"""Cache methods that transformers calls and that are the same for every cache of the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from labkit.engine.memory.beginnings import Beginnings
from labkit.engine.memory.stores import HeadStore
from labkit.models.config import ModelConfig


class CacheFacade(Cache):
    """Cache of `length` tokens for the layers of `config`, as `generate` sees it."""

    config: ModelConfig
    length: int
    device: torch.device
    heads: HeadStore | None  # None: empty, without memory
    _beginnings: Beginnings | None

    def __init__(self) -> None:
        super().__init__(layers=[])

    @property
    def batch_size(self) -> int:
        return self.heads.batch if self.heads else 0

    def select(self, rows: Any) -> None:
        """Replaces each tensor [B, ...] by `rows(tensor)`."""
        raise NotImplementedError

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0

    @property
    def is_initialized(self) -> bool:
        return self.heads is not None

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self.config.num_layers

    def __len__(self) -> int:
        return self.config.num_layers

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(lambda tensor: tensor.index_select(0, beam_idx.to(self.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(lambda tensor: tensor[indices].contiguous())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select(lambda tensor: tensor.repeat_interleave(repeats, dim=0))
        self._beginnings = Beginnings.repeated(self.batch_size, repeats, self.length)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(
            "a KVCache is filled by labkit's engine; give other models a transformers DynamicCache"
        )

    def activate_past_recording(self) -> None:
        """Nothing to do: all slots are kept."""

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        return True
