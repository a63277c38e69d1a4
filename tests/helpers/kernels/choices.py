"""Choices of tokens by transformers, and by one rule, made by the kernel and by operations of torch."""

from collections.abc import Callable
from typing import Any

import torch
from helpers.kernels.ops import Draw
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from labkit.kernels import choice
from labkit.kernels.choice import ScoreRule

VOCAB = 36
BATCH, LENGTH = 3, 12
Processors = list[LogitsProcessor]
PROMPT = torch.randint(0, 90, (BATCH, 5), generator=torch.Generator().manual_seed(1))

SETTINGS: dict[str, Callable[[], Processors]] = {
    "all tokens": list,
    "temperature": lambda: [hf.TemperatureLogitsWarper(0.7)],
    "cold": lambda: [hf.TemperatureLogitsWarper(1e-5)],
    "top-k 50": lambda: [hf.TopKLogitsWarper(50)],
    "top-k 1": lambda: [hf.TopKLogitsWarper(1)],
    "top-k 2000": lambda: [hf.TopKLogitsWarper(2000)],
    "top-k of a million": lambda: [hf.TopKLogitsWarper(10**6)],
    "top-k, top-p": lambda: [hf.TopKLogitsWarper(50), hf.TopPLogitsWarper(0.9)],
    "top-p": lambda: [hf.TopPLogitsWarper(0.9)],
    "top-p 0.3": lambda: [hf.TopPLogitsWarper(0.3)],
    "top-p 0": lambda: [hf.TopPLogitsWarper(0.0)],
    "top-p 1": lambda: [hf.TopPLogitsWarper(1.0)],
    "top-p of 7": lambda: [hf.TopPLogitsWarper(0.2, min_tokens_to_keep=7)],
    "min-p": lambda: [hf.MinPLogitsWarper(0.05)],
    "min-p of 7": lambda: [hf.MinPLogitsWarper(0.9, min_tokens_to_keep=7)],
    "typical": lambda: [hf.TypicalLogitsWarper(0.9)],
    "typical 0.2": lambda: [hf.TypicalLogitsWarper(0.2)],
    "epsilon": lambda: [hf.EpsilonLogitsWarper(3e-4)],
    "epsilon of 7": lambda: [hf.EpsilonLogitsWarper(0.9, min_tokens_to_keep=7)],
    "eta": lambda: [hf.EtaLogitsWarper(3e-4)],
    "repetition": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.3)],
    "repetition after the prompt": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=5)],
    "repetition of the prompt": lambda: [hf.EncoderRepetitionPenaltyLogitsProcessor(1.3, PROMPT)],
    "repetition of one prompt": lambda: [hf.EncoderRepetitionPenaltyLogitsProcessor(0.7, PROMPT[:1])],
    "n-grams": lambda: [hf.NoRepeatNGramLogitsProcessor(2)],
    "1-grams": lambda: [hf.NoRepeatNGramLogitsProcessor(1)],
    "bad words": lambda: [hf.NoBadWordsLogitsProcessor([[5], [1, 2], [3, 2], [7, 8, 9]])],
    "biases": lambda: [hf.SequenceBiasLogitsProcessor({(3,): 2.5, (1, 4): -3.0, (2, 5): 8.0})],
    "least length": lambda: [hf.MinLengthLogitsProcessor(20, [2, 3])],
    "least new tokens": lambda: [hf.MinNewTokensLengthLogitsProcessor(5, 9, 2)],
    "enough new tokens": lambda: [hf.MinNewTokensLengthLogitsProcessor(5, 7, 2)],
    "forced end": lambda: [hf.ForcedEOSTokenLogitsProcessor(LENGTH + 1, [2, 9])],
    "forced end later": lambda: [hf.ForcedEOSTokenLogitsProcessor(LENGTH + 2, 2)],
    "suppressed": lambda: [
        hf.SuppressTokensLogitsProcessor([0, 1, 2]),
        hf.SuppressTokensAtBeginLogitsProcessor([4, 5], LENGTH),
    ],
    "decay": lambda: [hf.ExponentialDecayLengthPenalty((2, 1.3), 2, 5)],
    "many": lambda: [
        hf.RepetitionPenaltyLogitsProcessor(1.1),
        hf.NoRepeatNGramLogitsProcessor(3),
        hf.MinLengthLogitsProcessor(20, 2),
        hf.TemperatureLogitsWarper(0.8),
        hf.TopKLogitsWarper(40),
        hf.TopPLogitsWarper(0.95),
        hf.MinPLogitsWarper(0.02),
    ],
}


OF_BATCH = {"repetition of the prompt", "repetition of one prompt"}


def by_transformers(processors: LogitsProcessorList, text: Tensor, logits: Tensor, *, samples: bool) -> Tensor:
    scores = processors(text, logits.clone())
    if not samples:
        return scores.argmax(dim=-1)
    return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)


def drawn_case(vocab: int, seed: int, spread: float) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(BATCH, vocab, generator=random)
    return logits, torch.randint(0, min(vocab, 90), (BATCH, LENGTH), generator=random)


def greedy(logits: Any, text: Any, rule: Any, *, threads: Any, impl: str) -> Tensor:
    """The choice by one rule; -1: none."""
    chosen = choice.choose(logits, text, [rule], samples=False, threads=threads)
    return torch.full((len(logits),), -1) if chosen is None else chosen


def plain_greedy(logits: Tensor, text: Tensor, rule: ScoreRule) -> Tensor:
    """The same by operations of torch."""
    scores, value = logits.clone(), rule.value
    for row, (own, tokens) in enumerate(zip(scores, text, strict=True)):
        if rule.kind in (choice.PENALTY_OF_TEXT, choice.PENALTY_OF_IDS):
            ids = tokens[rule.count :] if rule.ids is None else rule.ids[row]
            ids = ids[(ids >= 0) & (ids < len(own))]
            own[ids] = torch.where(own[ids] < 0, own[ids] * value, own[ids] / value)
        elif rule.kind == choice.TEMPERATURE:
            own /= value
        elif rule.ids is not None:
            before = own.clone()
            own.fill_(-torch.inf if rule.kind == choice.ONLY_TOKENS else 0).add_(before)
            last = rule.ids[-1:] if rule.kind == choice.BIAS else rule.ids
            changed = {choice.BIAS: before + value, choice.DECAY: before + before.abs() * value}
            if rule.kind != choice.BIAS or tokens[len(tokens) + 1 - len(rule.ids) :].equal(rule.ids[:-1]):
                own[last] = changed.get(rule.kind, torch.full_like(own, value))[last]
        elif rule.kind == choice.NGRAM and rule.count <= len(tokens):
            runs = tokens.unfold(0, rule.count, 1)
            ids = runs[(runs[:, :-1] == tokens[len(tokens) + 1 - rule.count :]).all(dim=1), -1]
            own[ids[(ids >= 0) & (ids < len(own))]] = -torch.inf
    usable = bool((scores < torch.inf).all() and (scores > -torch.inf).any(dim=1).all())
    return scores.argmax(dim=1) if usable else torch.full((len(scores),), -1)


def for_greedy(data: st.DataObject) -> dict[str, Any]:
    """Arguments of `greedy`: a rule of any kind up to TOP_P."""
    kind = data.draw(st.integers(0, choice.TOP_P))
    text = torch.tensor(
        data.draw(st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=1, max_size=2))
    )
    ids = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    ids_of_kind = ids.repeat(len(text), 1) if kind == choice.PENALTY_OF_IDS else ids
    rule = ScoreRule(
        kind,
        data.draw(st.sampled_from([0.25, 1.0])),
        ids_of_kind if kind in choice.WITH_IDS else None,
        data.draw(st.integers(1, 3)) if kind in (choice.PENALTY_OF_TEXT, choice.NGRAM, choice.TOP_K) else 0,
    )
    return {"logits": Draw().normal(len(text), VOCAB), "text": text, "rule": rule}
