"""Exercise: attention of one query, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.harness.judge.arrays import Input, JudgedCall, Result
from labkit.harness.judge.judge import Question
from labkit.notebooks.workshop.exercises import Attempt, Report, find_exercise
from labkit.notebooks.workshop.kernel_check import Kernel, check_kernel

QUERIES, BLOCKS, MOST_TOKENS, MOST_WIDTH = 16, 5, 40, 72
SPIKE = 200.0  # its exponential is beyond a float
FILE = "online_softmax.cpp"


def check(work: Attempt) -> Report:
    """Whether every call gives the attention over all blocks so far."""
    honest = find_exercise("online-softmax").solution / FILE
    return check_kernel(work, Kernel(FILE, "attend", "ppppiii", honest), draw)


def draw(rng: np.random.Generator) -> Sequence[Question]:
    """Queries of several blocks. In some of them a later block has the largest score, or all scores are large."""
    return [question for _ in range(QUERIES) for question in _blocks(rng)]


def _blocks(rng: np.random.Generator) -> Iterator[Question]:
    width = int(rng.integers(1, MOST_WIDTH))
    state = Result((width + 2,), initial=np.zeros(width + 2, np.float32), checked=False)
    offset = rng.choice([0.0, SPIKE, -SPIKE])
    all_scores: list[NDArray[np.float64]] = []
    all_values: list[NDArray[np.float64]] = []
    for number in range(BLOCKS):
        tokens = int(rng.integers(1, MOST_TOKENS))
        scores = (3 * rng.standard_normal(tokens) + offset + 20 * rng.standard_normal()).astype(np.float32)
        values = rng.standard_normal((tokens, width)).astype(np.float32)
        all_scores.append(scores.astype(np.float64))
        all_values.append(values.astype(np.float64))
        call = JudgedCall((Input(scores), Input(values), state, Result((width,)), tokens, width, int(number == 0)))
        yield Question(call, [_attention(all_scores, all_values)], _mistakes(all_scores, all_values) if number else {})


def _attention(scores: Sequence[NDArray[np.float64]], values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    joined = np.concatenate(scores)
    weights = np.exp(joined - joined.max())
    return np.asarray(weights @ np.concatenate(values) / weights.sum())


def _mistakes(
    scores: Sequence[NDArray[np.float64]], values: Sequence[NDArray[np.float64]]
) -> dict[str, Sequence[NDArray[np.float64]]]:
    """Results of common mistakes."""
    own = [np.exp(block - block.max()) for block in scores]  # relative to the block's own maximum
    unscaled = sum(weights @ of for weights, of in zip(own, values, strict=True)) / sum(map(np.sum, own))
    averaged = np.mean([_attention([s], [v]) for s, v in zip(scores, values, strict=True)], axis=0)
    return {
        "this is the attention over the last block alone; what was added before is lost": [
            _attention(scores[-1:], values[-1:])
        ],
        "each block is relative to its own maximum; sums from before have to be scaled to the new one": [
            np.asarray(unscaled)
        ],
        "this is the mean of the blocks' own attentions; blocks with larger scores count more": [averaged],
    }
