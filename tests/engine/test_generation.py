"""Greedy search and sampling equal transformers: its configuration, processors, criteria and random numbers."""

from typing import Any

import pytest
import torch
from helpers.models.engines import FEW, IMPLS, error, fused, greedy, prompt, vanilla
from helpers.sweeps import crossed
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    set_seed,
)
from transformers.generation.streamers import BaseStreamer

from labkit.kernels import build
from labkit.models.tokenizer import byte_tokenizer

MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 9])
PADDED = prompt(3, 9).where(MASK.bool(), 0)
GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition-penalty": {"repetition_penalty": 1.4},
    "no-repeated-pairs": {"no_repeat_ngram_size": 2},
    "bad-words": {"bad_words_ids": [[3], [5, 6], [77]]},
    "suppressed": {"suppress_tokens": list(range(40))},
    "eos-list": {"eos_token_id": list(range(1, 60, 3))},
    "eos-not-before": {"eos_token_id": list(range(1, 60, 2)), "min_new_tokens": 6},
    "min-length": {"eos_token_id": list(range(1, 60, 2)), "min_length": 14},
    "max-length": {"max_new_tokens": None, "max_length": 17},
    "forced-eos": {"forced_eos_token_id": 9},
    "guidance": {"guidance_scale": 1.5},
    "no-cache": {"use_cache": False},
    "static-cache": {"cache_implementation": "static"},
    "prefill-chunks": {"prefill_chunk_size": 4},
}
SAMPLED: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.05, "temperature": 1.4},
    "typical": {"typical_p": 0.6},
    "four-each": {"num_return_sequences": 4},
    "everything": {
        "temperature": 0.9, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3,
        "min_new_tokens": 4, "eos_token_id": [5, 9, 17, 30], "num_return_sequences": 2,
    },
}  # fmt: skip


def both(name: str, impl: str = "cpp", ids: Tensor = PADDED, **options: Any) -> tuple[Any, Any]:
    """Results of vanilla and the engine for the same call and seed, on a padded batch unless `ids` are given."""
    arguments = {
        "attention_mask": MASK if ids is PADDED else torch.ones_like(ids),
        "max_new_tokens": 20,
        "pad_token_id": 0,
    }
    results = []
    for model in (vanilla(name), fused(name, impl)):
        set_seed(11)
        results.append(model.generate(ids, **arguments | options))
    return results[0], results[1]


@pytest.mark.parametrize(("name", "options"), crossed(["gpt2", "bloom", "llama"], GREEDY))
def test_greedy_search_equals_vanilla(name: str, options: dict[str, Any]) -> None:
    expected, actual = both(name, do_sample=False, **options)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(("name", "options"), crossed(["gpt2", "bloom", "llama"], SAMPLED))
def test_sampling_with_a_seed_equals_vanilla(name: str, options: dict[str, Any]) -> None:
    expected, actual = both(name, do_sample=True, **options)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", FEW)
def test_every_impl_samples_alike(name: str) -> None:
    for impl in IMPLS:
        expected, actual = both(name, impl, do_sample=True, top_k=30)
        assert torch.equal(actual, expected)


def test_an_engine_without_compiled_kernels_lets_transformers_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be no compiler."""
    monkeypatch.setattr(build, "_in_use", {})
    monkeypatch.setattr(build, "compile_library", lambda weight_type: pytest.fail("compiled"))
    expected, actual = both("gpt2", "reference", do_sample=True, top_k=30)
    assert torch.equal(expected, actual)


def test_another_seed_samples_other_tokens() -> None:
    engine, ids = fused("gpt2"), prompt(1, 5)
    texts = set()
    for seed in range(3):
        set_seed(seed)
        texts.add(tuple(engine.generate(ids, do_sample=True, max_new_tokens=20, pad_token_id=0)[0].tolist()))
    assert len(texts) == 3


@pytest.mark.parametrize("search", [{"do_sample": False}, {"do_sample": True}, {"num_beams": 3}], ids=str)
def test_a_generation_config_equals_keywords(search: dict[str, Any]) -> None:
    options = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": 4, **search}
    set_seed(1)
    keywords = fused("llama").generate(prompt(2, 5), **options)
    set_seed(1)
    config = fused("llama").generate(prompt(2, 5), generation_config=GenerationConfig(**options))
    assert torch.equal(keywords, config)


@pytest.mark.parametrize("sample", [False, True])
def test_scores_and_logits_equal_vanilla(sample: bool) -> None:
    expected, actual = both(
        "gpt2", do_sample=sample, top_k=20 if sample else None, max_new_tokens=6,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    assert actual.keys() == expected.keys()
    assert torch.equal(actual.sequences, expected.sequences)
    assert len(actual.scores) == len(actual.logits) == 6
    for actual_step, expected_step in zip(actual.logits, expected.logits, strict=True):
        assert error(actual_step, expected_step) <= 1e-4
    for actual_step, expected_step in zip(actual.scores, expected.scores, strict=True):
        assert torch.equal(actual_step.isinf(), expected_step.isinf())
        assert error(actual_step.nan_to_num(neginf=0.0), expected_step.nan_to_num(neginf=0.0)) <= 1e-4


def test_hidden_states_while_generating_equal_vanilla() -> None:
    expected, actual = both(
        "llama", do_sample=False, max_new_tokens=4, return_dict_in_generate=True, output_hidden_states=True
    )
    assert torch.equal(actual.sequences, expected.sequences)
    for step, (actual_states, expected_states) in enumerate(
        zip(actual.hidden_states, expected.hidden_states, strict=True)
    ):
        visible = slice(None) if step else MASK.bool()  # only the prompt has padding
        for actual_state, expected_state in zip(actual_states, expected_states, strict=True):
            assert error(actual_state[visible], expected_state[visible]) <= 1e-4


def test_the_streamer_receives_the_prompt_then_every_token() -> None:
    class Collects(BaseStreamer):
        def __init__(self) -> None:
            self.put_values: list[Tensor] = []
            self.ended = 0

        def put(self, value: Tensor) -> None:
            self.put_values.append(value)

        def end(self) -> None:
            self.ended += 1

    streamers = [Collects(), Collects()]
    ids = prompt(1, 6)
    for model, streamer in zip((vanilla("gpt2"), fused("gpt2")), streamers, strict=True):
        greedy(model, ids, 7, streamer=streamer)
    expected, actual = streamers
    assert actual.ended == expected.ended == 1
    assert [value.shape for value in actual.put_values] == [value.shape for value in expected.put_values]
    assert all(torch.equal(a, b) for a, b in zip(actual.put_values, expected.put_values, strict=True))


class RecordsCalls(StoppingCriteria):
    """Stops each row at its third token divisible by five, and records the arguments of its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Any]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls.append((input_ids.clone(), scores))
        return ((input_ids[:, 9:] % 5 == 0).sum(1) >= 3).bool()


def test_a_stopping_criterion_of_the_caller_is_called_as_by_vanilla() -> None:
    criteria = [RecordsCalls(), RecordsCalls()]
    results = [
        greedy(
            model, PADDED, 30, attention_mask=MASK, stopping_criteria=StoppingCriteriaList([criterion]),
            return_dict_in_generate=True, output_scores=True,
        ).sequences
        for model, criterion in zip((vanilla("gpt2"), fused("gpt2")), criteria, strict=True)
    ]  # fmt: skip
    assert torch.equal(*results)
    expected, actual = (criterion.calls for criterion in criteria)
    assert len(actual) == len(expected)
    for (ids, scores), (expected_ids, expected_scores) in zip(actual, expected, strict=True):
        assert torch.equal(ids, expected_ids)
        assert type(scores) is type(expected_scores)
        assert len(scores) == len(expected_scores)


def test_a_logits_processor_of_the_caller_decides() -> None:
    class OnlyEven(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores[:, 1::2] = -torch.inf
            return scores

    expected, actual = both("llama", do_sample=False, logits_processor=LogitsProcessorList([OnlyEven()]))
    assert torch.equal(actual, expected)
    assert not (actual[:, 9:] % 2).any()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(300)


def test_stop_strings_equal_vanilla(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = prompt(1, 9)
    text = tokenizer.decode(greedy(vanilla("gpt2"), ids, 30)[0, 9:])
    stop = text[10:12]
    expected, actual = both(
        "gpt2", ids=ids, do_sample=False, max_new_tokens=30, stop_strings=[stop], tokenizer=tokenizer
    )
    assert torch.equal(actual, expected)
    assert actual.shape[1] < 39


def test_max_time_stops() -> None:
    ids = prompt(1, 4)
    assert greedy(fused("llama"), ids, 100_000, max_time=0.05).shape[1] < 50_000


def test_finished_rows_are_padded() -> None:
    ids = prompt(4, 6)
    unstopped = greedy(fused("gpt2"), ids, 20)
    eos = int(unstopped[0, 9])
    actual = greedy(fused("gpt2"), ids, 20, eos_token_id=eos)
    for row, text in enumerate(actual[:, 6:].tolist()):
        end = text.index(eos) if eos in text else len(text)
        assert text[:end] == unstopped[row, 6 : 6 + end].tolist()
        assert not any(text[end + 1 :])


def test_generation_starts_from_bos_without_a_prompt() -> None:
    expected = vanilla("gpt2").generate(bos_token_id=7, max_new_tokens=5, pad_token_id=0)
    assert torch.equal(fused("gpt2").generate(bos_token_id=7, max_new_tokens=5, pad_token_id=0), expected)
