"""Input and output of a runner: one step of one batch, and the steps that may follow in the same call.

B sequences, T new tokens of each, H hidden, V vocabulary. The records are made for every token, after the weights have
flushed the processor's caches. So most of them are named tuples, which are frozen and made in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from labkit.engine.memory.kv_cache import KVCache
from labkit.kernels.decode_step import TextRules
from labkit.kernels.types import Rows
from labkit.stages import Phase, phase_of

CHUNK_ROWS = 512  # rows per pass through the layers: bounds the workspace of a long prompt, and the ranks' exchanges


GOES_ON, ENDS, STOPS = 0, 1, 2  # marks of tokens


@dataclass(frozen=True)
class Ahead:
    """Further steps that a runner may run in the call of a step. Each reads the tokens that the step before it chose.
    Between two calls the processor's caches get cold, and threads fall asleep.

    most: steps in all, at least 1.
    marks: returns uint8 [V], the mark of every token of a vocabulary: ENDS ends a text; after STOPS the caller has to
    look at the texts, and no further step runs.
    ended: rows that have ended. Once all have, no further step runs.
    pad: token of rows that have ended; None: they are continued.
    choice: how tokens are chosen; None: the argmax.
    put: called with the chosen tokens int64 [B] of each step before the next one. It does not raise, and returns
    whether further steps may run. None: nobody waits for the tokens of a single step.
    """

    most: int
    marks: Callable[[int], Tensor]
    ended: frozenset[int]
    pad: int | None
    choice: TextRules | None = None
    put: Callable[[Tensor], bool] | None = None

    def add(self, tokens: Tensor) -> None:
        """Adds tokens int64 [B], on the device of `choice`, to its texts; padding to texts that have ended."""
        assert self.choice is not None
        if self.pad is not None:
            tokens[list(self.ended)] = self.pad
        self.choice.tokens[:, self.choice.length] = tokens


class StepInput(NamedTuple):
    """New tokens, which the step adds to the tokens in `cache`.

    tokens: int64 [B, T]; None: `rows` are given.
    attention_mask: [B, past + T], 0 hides a token.
    position_ids: [B or 1, T].
    keep: number of last tokens of each sequence that need results.
    greedy: results are the argmax instead of logits.
    top: number of largest logits that are needed, the others may be -inf; None: all are needed.
    hidden_states: the inputs of every layer are results, too.
    follows: one token per sequence, chosen from the results of the previous step. It is in the vocabulary, visible and
    at the next position, so that nothing has to be checked between two steps.
    rows: float32 [B, T, H], input of layers that are not the first of a model.
    ahead: steps that may follow in the same call; None: none.
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
    ahead: Ahead | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)"""
        inputs = self.rows if self.tokens is None else self.tokens
        assert inputs is not None
        return inputs.shape[0], inputs.shape[1]

    @property
    def phase(self) -> Phase:
        return Phase.DECODE if self.follows else phase_of(self.cache.length, self.shape[1])


class StepOutput(NamedTuple):
    """Results of a step.

    result: logits float32 [B, keep, V], or the argmax int64 [B, keep], followed by the tokens of the steps ahead; None:
    `keep` is 0, later layers of the model follow, or the last of the steps ahead has chosen its tokens by rules.
    hidden_states: [B, T, H] each, before every layer and after the last norm.
    rows: float32 [B, T, H], input of the later layers, if there are any.
    chosen: number of tokens that steps ahead have added to each text by rules.
    """

    result: Tensor | None = None
    hidden_states: tuple[Tensor, ...] = ()
    rows: Tensor | None = None
    chosen: int = 0

    def collect(self) -> StepOutput:
        """Returns itself: a step that is complete when `begin` returns is its own `Pending`."""
        return self


class Pending(Protocol):
    """A step that has begun."""

    def collect(self) -> StepOutput:
        """Waits for the end of the step, and returns its results."""


@dataclass(frozen=True)
class CollectedLater:
    """A step that `wait` completes."""

    wait: Callable[[], StepOutput]

    def collect(self) -> StepOutput:
        return self.wait()


@dataclass(frozen=True)
class Node:
    """One kernel of a step. Nodes are listed in the order of launch."""

    kernel: str
    stage: str  # for example "decode/layer.3/qkv"


class Chunk(NamedTuple):
    """Tokens of a step that go through a layer together."""

    tokens: Tensor | None
    inputs: Tensor | None  # float32 [B * T, H]
    rows: Rows
    past: int  # write position: number of tokens in the cache before these
    keep: int
    phase: Phase
    first_sequence: int = 0  # the chunk's first sequence in the cache; its others follow


def placed_chunks(step: StepInput, device: torch.device) -> Iterator[Chunk]:
    """Yields the tokens of a step in chunks of at most CHUNK_ROWS rows, but at least one token of each sequence. With
    hidden states, all tokens are one chunk.

    A chunk is placed in the cache before it is yielded, and committed when the caller asks for the next chunk.
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
    """Returns the range of tokens, in every sequence, that the placed chunks add to the cache."""
    return range(chunks[0].past, cache.length)


def joined(parts: list[Tensor]) -> Tensor | None:
    """Returns the results of a step's chunks joined along the tokens; None: there are no results."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return torch.cat(parts, dim=1)
