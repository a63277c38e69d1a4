"""What transformers asks of any cache, and what is the same for every one of the engine's."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache

from labkit.models.config import ModelConfig


class CacheFacade(Cache):
    """A cache of `length` tokens for the layers of `config`, as `generate` sees it."""

    config: ModelConfig
    length: int

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0

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

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(
            "a KVCache is filled by labkit's engine; give other models a transformers DynamicCache"
        )

    def activate_past_recording(self) -> None:
        """Nothing to do: all slots are kept."""

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        return True
