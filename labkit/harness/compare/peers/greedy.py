"""Greedy generation with a runtime that computes the logits of one step at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig
from transformers.generation import BaseStreamer


class GreedySteps(ABC):
    """A model that computes one step after the other. It keeps the KV cache of the tokens that it has read."""

    weights_in_tensors = False  # they are in memory of the runtime

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config

    @abstractmethod
    def forget(self) -> None:
        """Empties the KV cache."""

    @abstractmethod
    def logits(self, unread: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Reads more tokens [sequence, position]. Returns the logits [sequence, vocabulary] after the last position."""

    def generate(
        self, input_ids: torch.Tensor, *, streamer: BaseStreamer, max_new_tokens: int, **greedy: Any
    ) -> torch.Tensor:
        """Generates `max_new_tokens` greedy tokens, also after an end of text. The streamer gets each immediately."""
        self.forget()
        streamer.put(input_ids)
        read = [input_ids.numpy()]
        for _ in range(max_new_tokens):
            read.append(self.logits(read[-1]).argmax(-1)[:, None])
            streamer.put(torch.from_numpy(read[-1][:, 0]))
        streamer.end()
        return torch.from_numpy(np.concatenate(read, axis=1))
