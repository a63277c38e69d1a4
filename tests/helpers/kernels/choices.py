"""Choices of tokens by one rule, made by the kernel and by operations of torch."""

from typing import Any

import torch
from helpers.kernels.ops import Draw
from hypothesis import strategies as st
from torch import Tensor

from labkit.kernels import choice
from labkit.kernels.choice import ScoreRule

VOCAB = 36


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
