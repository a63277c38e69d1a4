"""Some rows of a batch on their way through the stages, as each stage sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isqrt

from torch import Tensor

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.driving import TextBatch
from labkit.engine.runners.step import CHUNK_ROWS, StepInput

OVERHEAD_ROWS = 5  # as much as a piece of a prompt takes beside computing
LEAST_PIECE = 32  # rows: with fewer, the kernels do not reach their rate


@dataclass(eq=False)
class MicroBatch:
    """rows: by their numbers in the whole batch. prompt: the step that they begin with, on the keys and values of this
    stage's layers, in pieces of `piece` rows at most. done: steps so far.
    """

    number: int
    texts: TextBatch
    rows: list[int]
    prompt: StepInput
    piece: int = CHUNK_ROWS
    done: int = 0
    _chunks: Iterator[StepInput] = field(init=False)
    _left: int = field(init=False)  # tokens of the prompt that have not been here

    def __post_init__(self) -> None:
        self._chunks, self._left = chunks_of(self.prompt, self.piece), self.prompt.shape[1]

    @classmethod
    def of(cls, number: int, texts: TextBatch, rows: range, piece: int) -> MicroBatch:
        loop = texts.loop()
        prompt = next(loop)
        loop.close()
        return cls(number, texts, list(rows), prompt, piece)

    @property
    def cache(self) -> KVCache:
        return self.prompt.cache

    @property
    def length(self) -> int:
        """The tokens of each text so far, the prompt's with them."""
        return self.texts.tokens.shape[1]

    @property
    def has_prompt_left(self) -> bool:
        return self._left > 0

    def next_step(self, given: Tensor) -> StepInput:
        """The step that a message is about: the next piece of the prompt, or one token of each row.

        given: tokens int64 [B, 1], or float32 [B * T, H], the rows of the stage before.
        """
        if self.has_prompt_left:
            step = next(self._chunks)
            self._left -= step.shape[1]
            return with_rows(step, given)
        step = StepInput(given, self.cache, follows=True)
        return step if not given.is_floating_point() else with_rows(step, given)

    def prompt_steps(self) -> Iterator[StepInput]:
        """The pieces of the prompt, of the stage that begins with its tokens."""
        for step in self._chunks:
            self._left -= step.shape[1]
            yield step


def with_rows(step: StepInput, rows_NH: Tensor) -> StepInput:
    """The same step for layers that begin with rows."""
    batch = len(rows_NH) if step.follows else step.shape[0]
    return step._replace(tokens=None, rows=rows_NH.view(batch, -1, rows_NH.shape[-1]))


def piece_rows(rows: int, stages: int) -> int:
    """How many rows of prompts go through the stages at a time.

    All n = rows / s pieces of s rows have passed P stages after (n + P - 1) times that of a piece, which is c (s + o):
    what it takes before it computes, most of it reading weights, is as much as o rows take. Of this, c times
    (rows + rows o / s + (P - 1) s + (P - 1) o), the terms with s are least for s = sqrt(o rows / (P - 1)).
    """
    return max(LEAST_PIECE, min(CHUNK_ROWS, isqrt(OVERHEAD_ROWS * rows // max(1, stages - 1))))


def chunks_of(step: StepInput, most: int = CHUNK_ROWS) -> Iterator[StepInput]:
    """The same tokens in steps of at most `most` rows, or one token of each sequence: so that the next stage works on
    the first ones while this one is at those behind them. What comes of each is wanted before the next is asked for.
    """
    if step.follows:
        yield step
        return
    (batch, tokens), past = step.shape, step.cache.length
    step.cache.reserve(batch, past + tokens)
    size = max(1, most // batch)
    for begin in range(0, tokens, size):
        end = min(begin + size, tokens)
        assert step.tokens is not None
        yield step._replace(
            tokens=step.tokens[:, begin:end],
            attention_mask=None if step.attention_mask is None else step.attention_mask[:, : past + end],
            position_ids=None if step.position_ids is None else step.position_ids[:, begin:end],
            keep=max(0, end - max(begin, tokens - step.keep)),
        )
