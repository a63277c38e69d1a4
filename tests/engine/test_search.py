"""Searches on the fused model: beams, and assisted decoding in transformers' own loop."""

from typing import Any

import pytest
import torch
from helpers.models.engines import FEW, IMPLS, fused, greedy, prompt, vanilla
from helpers.models.small_models import small_model
from helpers.sweeps import crossed
from transformers import set_seed

import labkit
from labkit.engine.memory import beginnings
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.step import Pending, StepInput
from labkit.kernels.types import Rows

MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
PADDED = prompt(2, 7).where(MASK.bool(), 0)
BEAMS: dict[str, dict[str, Any]] = {
    "three": {"num_beams": 3},
    "four-return-three": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.7, "eos_token_id": [3, 50]},
    "early": {"num_beams": 3, "early_stopping": True, "eos_token_id": list(range(1, 40, 3)), "min_new_tokens": 3},
    "never": {"num_beams": 3, "early_stopping": "never", "length_penalty": 1.5, "eos_token_id": [7, 50, 61, 80]},
    "short": {"num_beams": 4, "length_penalty": -0.5, "eos_token_id": list(range(0, 131, 4)), "max_new_tokens": 20},
    "sampled": {"num_beams": 2, "do_sample": True, "top_k": 20},
    "no-repeats": {"num_beams": 3, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize(("name", "options"), crossed(FEW, BEAMS))
def test_beams_equal_vanilla(name: str, options: dict[str, Any]) -> None:
    texts = []
    for model in (vanilla(name), *(fused(name, impl) for impl in IMPLS)):
        set_seed(3)
        texts.append(model.generate(PADDED, attention_mask=MASK, **{"max_new_tokens": 12, "pad_token_id": 0} | options))
    assert torch.equal(texts[1], texts[0])
    assert torch.equal(texts[2], texts[0])


def test_beam_scores_equal_vanilla() -> None:
    options = {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}
    expected, actual = (
        model.generate(prompt(2, 7), max_new_tokens=6, pad_token_id=0, **options)
        for model in (vanilla("gpt2"), fused("gpt2"))
    )
    assert torch.equal(actual.sequences, expected.sequences)
    assert torch.equal(actual.beam_indices, expected.beam_indices)
    assert torch.allclose(actual.sequences_scores, expected.sequences_scores, atol=1e-4)


def counted() -> tuple[labkit.InferenceEngine, list[tuple[int, int]]]:
    """An engine, and the shapes (B, T) of the steps that it will run."""
    engine, shapes = labkit.init_inference(vanilla("llama"), impl="cpp"), []
    begin = engine.module.runner.begin

    def noted(step: StepInput) -> Pending:
        shapes.append(step.shape)
        return begin(step)

    engine.module.runner.begin = noted
    return engine, shapes


def test_beams_of_one_text_read_its_prompt_once() -> None:
    engine, rows = counted()
    output = engine.generate(prompt(2, 7), num_beams=3, max_new_tokens=4, pad_token_id=0, return_dict_in_generate=True)
    assert rows == [(2, 7)] + [(6, 1)] * 3
    assert output.past_key_values.batch_size == 6


@pytest.mark.parametrize("padded", [False, True])
def test_several_answers_to_a_text_read_its_prompt_once(padded: bool) -> None:
    engine, rows = counted()
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 9, "pad_token_id": 0}
    texts = []
    for model in (vanilla("llama"), engine):
        set_seed(4)
        texts.append(model.generate(PADDED, attention_mask=MASK if padded else torch.ones_like(MASK), **options))
    assert torch.equal(*texts)
    assert rows[:2] == [(2, 7), (6, 1)]


@pytest.mark.parametrize("name", ["llama", "bloom", "mistral"])
def test_beams_that_share_a_long_prompt_equal_vanilla(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[int] = []
    place_next = KVCache.place_next

    def noted(cache: KVCache, batch: int) -> Rows:
        rows = place_next(cache, batch)
        shared.append(rows.shared)
        return rows

    monkeypatch.setattr(KVCache, "place_next", noted)
    monkeypatch.setattr(beginnings, "LEAST_SHARED", 16)
    ids, mask = prompt(2, 50), torch.ones(2, 50, dtype=torch.int64)
    mask[0, :30] = 0
    options = {"attention_mask": mask, "num_beams": 3, "max_new_tokens": 12, "pad_token_id": 0}
    texts = [model.generate(ids.where(mask.bool(), 0), **options) for model in (vanilla(name), fused(name, "cpp"))]
    assert torch.equal(*texts)
    assert min(shared) >= 50


def test_a_cache_of_the_caller_goes_on_in_beams() -> None:
    ids, texts = prompt(1, 9), []
    for model in (vanilla("gpt2"), fused("gpt2")):
        cache = model(ids[:, :6]).past_key_values
        cache.batch_repeat_interleave(3)
        texts.append(model.generate(ids, past_key_values=cache, num_beams=3, max_new_tokens=8, pad_token_id=0))
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "llama"])
def test_prompt_lookup_equals_greedy_search(name: str) -> None:
    ids = torch.cat((prompt(1, 6), prompt(1, 6)), dim=1)
    expected = greedy(vanilla(name), ids, 30)
    assert torch.equal(greedy(fused(name), ids, 30, prompt_lookup_num_tokens=3), expected)


@pytest.mark.parametrize("draft_seed", [5, 9], ids=["the-same-model", "another-model"])
@pytest.mark.parametrize("name", ["gpt2", "bloom", "llama"])
def test_assisted_decoding_equals_greedy_search(name: str, draft_seed: int) -> None:
    """In every pairing of vanilla and fused models, and of a fused model with an engine as the draft."""
    ids, draft = prompt(1, 7), small_model(name, seed=draft_seed)
    expected = greedy(vanilla(name), ids, 25)
    fused_draft = labkit.init_inference(draft)
    for model, assistant in (
        (fused(name), draft),
        (vanilla(name), fused_draft.module),
        (fused(name), fused_draft),
    ):
        assert torch.equal(greedy(model, ids, 25, assistant_model=assistant), expected)
