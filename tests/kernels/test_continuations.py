"""The kernel finds the best continuations of beams as torch's `topk` does, or leaves them to it."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from labkit.kernels.choice import BIAS, NGRAM, PENALTY_OF_TEXT, SET_SCORES, ScoreRule
from labkit.kernels.choice.continuations import continue_beams

TEXT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]] * 3).view(3, 2, 8)
NO_RULES: list[ScoreRule] = []


def drawn(texts: int, beams: int, vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    """Log probabilities [texts * beams, vocab] and scores [texts, beams]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(texts * beams, vocab, generator=generator) * 3
    return torch.log_softmax(logits, dim=-1), torch.randn(texts, beams, generator=generator).cumsum(dim=-1) * 5


def expected(log_probs: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    sums = log_probs.view(*scores.shape, -1) + scores[:, :, None]
    best, places = torch.topk(sums.view(len(scores), -1), k=count)
    return best, places


@given(st.integers(1, 3), st.integers(1, 5), st.integers(2, 300), st.integers(1, 20), st.integers(0, 99))
@settings(deadline=None)
def test_sums_and_places_are_those_of_topk(texts: int, beams: int, vocab: int, count: int, seed: int) -> None:
    log_probs, scores = drawn(texts, beams, vocab, seed)
    count = min(count, beams * vocab)
    found = continue_beams(log_probs, scores, torch.zeros(texts, beams, 1).long(), 1, NO_RULES, count=count, threads=2)
    largest = expected(log_probs, scores, min(count + 1, beams * vocab))[0]
    assert (found is None) == bool((largest.diff(dim=1) == 0).any())
    for mine, theirs in zip(found or (), expected(log_probs, scores, count), strict=found is not None):
        assert torch.equal(mine, theirs)


RULES = {
    "a penalty": ScoreRule(PENALTY_OF_TEXT, 1.3),
    "a score": ScoreRule(SET_SCORES, -math.inf, torch.tensor([0, 4])),
    "a bias": ScoreRule(BIAS, 2.5, torch.tensor([6, 2])),
    "pairs": ScoreRule(NGRAM, count=2),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rules_change_log_probabilities(rule: ScoreRule) -> None:
    log_probs, scores = drawn(3, 2, 40, 7)
    changed = log_probs.clone()
    for row, text in zip(changed, TEXT.view(6, 8), strict=True):
        if rule.kind == PENALTY_OF_TEXT:
            row[text.unique()] *= 1.3
        elif rule.kind == SET_SCORES:
            row[[0, 4]] = -math.inf
        elif rule.kind == BIAS and int(text[-1]) == 6:
            row[2] += 2.5
        elif rule.kind == NGRAM:
            row[[int(after) for before, after in pairwise(text) if before == text[-1]]] = -math.inf
    found = continue_beams(log_probs, scores, TEXT, 8, [rule], count=6)
    assert found is not None
    for mine, theirs in zip(found, expected(changed, scores, 6), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(log_probs, drawn(3, 2, 40, 7)[0])


@pytest.mark.parametrize("kind", ["equal", "equal at the end", "nan", "too few"])
def test_what_the_order_of_torch_decides_is_left_to_it(kind: str) -> None:
    log_probs, scores = drawn(1, 2, 8, 3)
    count = 4
    best, places = expected(log_probs, scores, count + 1)
    place = int(places[0, 1 if kind == "equal" else count])
    if kind.startswith("equal"):
        target = best[0, 0 if kind == "equal" else count - 1] - scores[0, place // 8]
        log_probs[place // 8, place % 8] = target
        log_probs.nan_to_num_()
        sums = (log_probs + scores[0][:, None]).flatten().sort(descending=True)[0]
        assert sums[:count].unique().numel() < count or sums[count] == sums[count - 1]
    elif kind == "nan":
        log_probs[1] = math.nan
    else:
        count = 17
    assert continue_beams(log_probs, scores, torch.zeros(1, 2, 1).long(), 1, NO_RULES, count=count) is None
