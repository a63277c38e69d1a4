"""Micro-batches: rows of a batch on their way through the stages, as each stage sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isqrt

from torch import Tensor

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.driving import TextBatch
from labkit.engine.runners.step import CHUNK_ROWS, StepInput

OVERHEAD_ROWS = 5  # fixed cost of a piece of a prompt, in rows that take the same time to compute
LEAST_PIECE = 32  # rows: the kernels do not reach their rate with fewer


@dataclass(eq=False)
class MicroBatch:
    """One micro-batch on one stage."""

    number: int
    texts: TextBatch
    rows: list[int]  # their numbers in the whole batch
    prompt: StepInput  # first step, with the cache of this stage's layers
    piece: int = CHUNK_ROWS  # most rows of the prompt in one piece
    done: int = 0  # steps so far
    _chunks: Iterator[StepInput] = field(init=False)
    _left: int = field(init=False)  # tokens of the prompt that this stage has not run

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
        """Tokens of each text so far, prompt included."""
        return self.texts.tokens.shape[1]

    @property
    def has_prompt_left(self) -> bool:
        return self._left > 0

    def next_step(self, inputs: Tensor) -> StepInput:
        """Returns the step for a message: the next piece of the prompt, or one token of each row.

        inputs: tokens int64 [B, 1], or the output rows of the previous stage, float32 [B * T, H].
        """
        if self.has_prompt_left:
            step = next(self._chunks)
            self._left -= step.shape[1]
            return with_rows(step, inputs)
        step = StepInput(inputs, self.cache, follows=True)
        return with_rows(step, inputs) if inputs.is_floating_point() else step

    def prompt_steps(self) -> Iterator[StepInput]:
        """Yields the pieces of the prompt. For the first stage, which begins with tokens."""
        for step in self._chunks:
            self._left -= step.shape[1]
            yield step


def with_rows(step: StepInput, rows_NH: Tensor) -> StepInput:
    """Returns the step with rows instead of tokens, for layers after the first stage."""
    batch = len(rows_NH) if step.follows else step.shape[0]
    return step._replace(tokens=None, rows=rows_NH.view(batch, -1, rows_NH.shape[-1]))


def piece_rows(rows: int, stages: int) -> int:
    """Returns the best number s of prompt rows that go through the stages at a time.

    A piece of s rows takes c (s + o): its fixed cost, mostly reading weights, equals o rows. All n = rows / s pieces
    pass P stages in n + P - 1 times that, which is c (rows + rows o / s + (P - 1) s + (P - 1) o). The terms with s are
    least for s = sqrt(o rows / (P - 1)).
    """
    return max(LEAST_PIECE, min(CHUNK_ROWS, isqrt(OVERHEAD_ROWS * rows // max(1, stages - 1))))


def chunks_of(step: StepInput, most: int = CHUNK_ROWS) -> Iterator[StepInput]:
    """Yields the same tokens in steps of at most `most` rows, but at least one token of each sequence. So the next
    stage works on the first pieces while this stage works on later ones. Each step has to be collected before the next
    one is taken.
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
