"""Exercise: attention of one new token in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from labkit.harness.judge.arrays import Input, JudgedCall, Result
from labkit.harness.judge.judge import Question, Task
from labkit.harness.judge.judge import check as judge_check
from labkit.harness.judge.judged_process import Submission, site_packages
from labkit.notebooks.workshop.exercises import Attempt, Remark, Report, find_exercise

FILE, KERNEL = "attention.py", "attention_kernel"
HEADS, WIDTH, BLOCK = 2, 16, 32
LOW = 200.0  # below it an exponential in float32 is 0
TOKENS = (1, 5, 31, 32, 33, 64, 70, 100)


def check(work: Attempt) -> Report:
    """Whether the kernel is right for any number of tokens."""
    honest = find_exercise("triton-attention").solution / FILE
    finding = judge_check(_submission(work.folder / FILE), Task(draw, _submission(honest)), work.random)
    if not finding.right:
        return Report((Remark(f"`{KERNEL}`: {finding.problem}", right=False),))
    words = f"`{KERNEL}` is right for {', '.join(map(str, TOKENS))} tokens in blocks of {BLOCK}"
    return Report((Remark(words, right=True),))


def _submission(file: Path) -> Submission:
    return Submission(
        file, KERNEL, "triton", grid=(HEADS,), imports=("torch", "triton", "triton.language"), readable=site_packages()
    )


def draw(rng: np.random.Generator) -> Sequence[Question]:
    """A call for each number of tokens, in random order. Some scores are beyond an exponential, on either side."""
    return [_question(rng, int(tokens)) for tokens in rng.permutation(TOKENS)]


def _question(rng: np.random.Generator, tokens: int) -> Question:
    query = (rng.choice([1.0, 40.0]) * rng.standard_normal((HEADS, WIDTH))).astype(np.float32)
    keys, values = (rng.standard_normal((HEADS, tokens, WIDTH)).astype(np.float32) for _ in range(2))
    scale = float(np.float32(1 / np.sqrt(WIDTH)))
    lower = rng.choice([0.0, LOW]) / scale / (query**2).sum(axis=1)  # takes this from every score
    keys -= (lower[:, None] * query)[:, None, :].astype(np.float32)
    call = JudgedCall((Input(query), Input(keys), Input(values), Result((HEADS, WIDTH)), tokens, scale, WIDTH, BLOCK))
    scores = np.einsum("hw,htw->ht", query.astype(np.float64), keys) * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))

    def mixed(of_weights: np.ndarray) -> np.ndarray:
        return np.einsum("ht,htw->hw", of_weights / of_weights.sum(axis=1, keepdims=True), values)

    unscaled = np.exp(scores / scale - scores.max(axis=1, keepdims=True) / scale)
    mistakes = {
        "the scores are not multiplied by `scale`": [mixed(unscaled)],
        "the weighted sum is not divided by the sum of the weights": [np.einsum("ht,htw->hw", weights, values)],
    }
    if tokens > BLOCK:
        sentence = "what was added before is not scaled when a larger score comes"
        mistakes[sentence] = [mixed(np.exp(scores - _maximum_so_far(scores)))]
        whole = tokens // BLOCK * BLOCK
        mistakes["this is the attention over the first block alone"] = [
            mixed(np.where(np.arange(tokens) < BLOCK, weights, 0))
        ]
        if whole < tokens:
            mistakes["the tokens after the last whole block are missing"] = [
                mixed(np.where(np.arange(tokens) < whole, weights, 0))
            ]
    if tokens % BLOCK:
        padded = np.concatenate([scores, np.zeros((HEADS, -tokens % BLOCK))], axis=1)
        shares = np.exp(padded - padded.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        sentence = "rows that are not there have a score of 0, and so a weight"
        mistakes[sentence] = [np.einsum("ht,htw->hw", shares[:, :tokens], values)]
    return Question(call, [mixed(weights)], mistakes, about=f"{tokens} tokens")


def _maximum_so_far(scores: np.ndarray) -> np.ndarray:
    """For each score the largest one up to the end of its block."""
    of_blocks = [scores[:, : end + BLOCK].max(axis=1) for end in range(0, scores.shape[1], BLOCK)]
    return np.repeat(np.stack(of_blocks, axis=1), BLOCK, axis=1)[:, : scores.shape[1]]
