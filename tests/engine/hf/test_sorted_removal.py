"""Processors with a faster sort give the scores of transformers' own, bit for bit."""

from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

from labkit.engine.hf.sorted_removal import FASTER, processed_scores

PROCESSORS: dict[str, LogitsProcessor] = {
    "top-p": TopPLogitsWarper(0.9),
    "top-p 0": TopPLogitsWarper(0.0),
    "top-p 1": TopPLogitsWarper(1.0),
    "top-p of 3": TopPLogitsWarper(0.3, min_tokens_to_keep=3),
    "top-p with a mark": TopPLogitsWarper(0.5, filter_value=-1e4),
    "typical": TypicalLogitsWarper(0.9),
    "typical 0.2": TypicalLogitsWarper(0.2),
    "typical of 3": TypicalLogitsWarper(0.5, min_tokens_to_keep=3),
}
TEXT = torch.zeros(1, 1, dtype=torch.int64)


def agrees(name: str, scores: Tensor) -> None:
    before = scores.clone()
    expected = PROCESSORS[name](TEXT, scores)  # type: ignore[arg-type]
    actual = processed_scores(LogitsProcessorList([PROCESSORS[name]]), TEXT, scores)
    assert torch.equal(actual.nan_to_num(nan=7e7), expected.nan_to_num(nan=7e7))
    assert torch.equal(scores.nan_to_num(nan=7e7), before.nan_to_num(nan=7e7))


@pytest.mark.parametrize("name", PROCESSORS)
def test_scores_are_those_of_transformers(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for vocab, spread in ((1, 1.0), (101, 0.3), (101, 8.0), (5_000, 2.0), (49_152, 0.5), (49_152, 3.0)):
        if vocab > 2:
            agrees(name, spread * torch.randn(3, vocab, generator=generator))
    agrees(name, (8 * torch.randn(2, 300, generator=generator)).round())  # many are equal
    agrees(name, TopKLogitsWarper(20)(TEXT, torch.randn(2, 300, generator=generator)))  # type: ignore[arg-type]


STRANGE = st.sampled_from([-inf, inf, nan, -1e30, -2.0, 0.0, -0.0, 1e-30, 1.0, 1.0000001, 3e38])


@given(st.lists(STRANGE | st.floats(width=32), min_size=4, max_size=9), st.sampled_from(list(PROCESSORS)))
def test_strange_scores_are_those_of_transformers(scores: list[float], name: str) -> None:
    agrees(name, torch.tensor([scores]))


@pytest.mark.parametrize("name", ["top-p", "typical"])
def test_usual_scores_need_no_sort_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "sort", lambda *_, **__: pytest.fail("a sort of torch"))
    processed_scores(
        LogitsProcessorList([PROCESSORS[name]]), TEXT, torch.randn(2, 999, generator=torch.Generator().manual_seed(1))
    )


def test_only_classes_of_transformers_itself_are_known() -> None:
    class OfTheUser(TopPLogitsWarper):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
            return scores + 1

    scores = torch.randn(1, 9)
    assert torch.equal(processed_scores(LogitsProcessorList([OfTheUser(0.5)]), TEXT, scores), scores + 1)
    assert set(FASTER) == {TopPLogitsWarper, TypicalLogitsWarper}
    assert processed_scores(LogitsProcessorList(), TEXT, scores) is scores
