"""What a runner takes and gives: one step of one batch.

B sequences, T new tokens of each, H hidden, V vocabulary. These records are made anew for every token, when the weights
have swept the processor's caches clean: named tuples are frozen, and made in one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from labkit.engine.memory.kv_cache import KVCache
from labkit.kernels.types import Rows
from labkit.stages import Phase, phase_of

CHUNK_ROWS = 512  # rows per pass through the layers: bounds the workspace of a long prompt, and what ranks exchange


class StepInput(NamedTuple):
    """New tokens on top of those that `cache` holds, which the step adds to it.

    tokens: int64 [B, T]; or rows: float32 [B, T, H], for layers that are not the first of a model.
    attention_mask: [B, past + T], 0 hides a token. position_ids: [B or 1, T].
    keep: results are wanted for the last `keep` tokens of each sequence: their logits, or with `greedy` the argmax.
    top: so many of the largest logits are enough, the others may be -inf. hidden_states: what every layer starts from
    is wanted too.
    follows: one token per sequence, chosen from the results of the step before. It is of the vocabulary, visible and at
    the next position, so that there is nothing to check between two steps.
    """

    tokens: Tensor | None
    cache: KVCache
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    keep: int = 1
    greedy: bool = False
    top: int | None = None
    hidden_states: bool = False
    follows: bool = False
    rows: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)"""
        given = self.rows if self.tokens is None else self.tokens
        assert given is not None
        return given.shape[0], given.shape[1]

    @property
    def phase(self) -> Phase:
        return Phase.DECODE if self.follows else phase_of(self.cache.length, self.shape[1])


class StepOutput(NamedTuple):
    """What came of a step.

    result: logits float32 [B, keep, V], or the argmax int64 [B, keep]; None where nothing was kept, or the layers are
    not the last of a model: then `rows` float32 [B, T, H] go on to the next ones. hidden_states: [B, T, H] each, before
    every layer and after the last norm.
    """

    result: Tensor | None = None
    hidden_states: tuple[Tensor, ...] = ()
    rows: Tensor | None = None

    def collect(self) -> StepOutput:
        """Itself: a step that is done when `begin` returns is its own pending one."""
        return self


class Pending(Protocol):
    """A step that was begun."""

    def collect(self) -> StepOutput:
        """What came of it, waiting for its end."""


@dataclass(frozen=True)
class Node:
    """One kernel of a step: its name, and the stage that it belongs to ("decode/layer.3/qkv"), in order of launch."""

    kernel: str
    stage: str


class Chunk(NamedTuple):
    """Tokens of a step that go through a layer together, with their place in the cache: behind `past` others."""

    tokens: Tensor | None
    inputs: Tensor | None  # float32 [B * T, H]
    rows: Rows
    past: int
    keep: int
    phase: Phase


def placed_chunks(step: StepInput, device: torch.device) -> Iterator[Chunk]:
    """The tokens of a step in chunks of at most CHUNK_ROWS rows, or one token of each sequence; all at once where
    hidden states are wanted.

    Each is placed in the cache when it is asked for, and counts as held by it once the next one is.
    """
    cache = step.cache
    if step.follows:
        batch, inputs = step.shape[0], None if step.rows is None else step.rows.flatten(0, 1)
        yield Chunk(step.tokens, inputs, cache.place_next(batch), cache.length, 1, Phase.DECODE)
        cache.length += 1
        return
    phase, (batch, tokens), past = step.phase, step.shape, cache.length
    ids = None if step.tokens is None else step.tokens.to(device, torch.int64)
    mask = None if step.attention_mask is None else step.attention_mask.to(device)
    cache.reserve(batch, past + tokens)
    size = tokens if step.hidden_states else max(1, CHUNK_ROWS // batch)
    for begin in range(0, tokens, size):
        end = min(begin + size, tokens)
        rows = cache.place(
            batch,
            end - begin,
            None if mask is None else mask[:, : past + end],
            None if step.position_ids is None else step.position_ids[:, begin:end],
        )
        yield Chunk(
            tokens=None if ids is None else ids[:, begin:end].contiguous(),
            inputs=None if step.rows is None else step.rows[:, begin:end].flatten(0, 1).contiguous(),
            rows=rows,
            past=past + begin,
            keep=max(0, end - max(begin, tokens - step.keep)),
            phase=phase,
        )
        cache.length = past + end


def written(cache: KVCache, chunks: list[Chunk]) -> range:
    """The tokens of every sequence that chunks which have been placed add to the cache."""
    return range(chunks[0].past, cache.length)


def joined(parts: list[Tensor]) -> Tensor | None:
    """What the chunks of a step gave, side by side along the tokens; None where none gave anything."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return torch.cat(parts, dim=1)
