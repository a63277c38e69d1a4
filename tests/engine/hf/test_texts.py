"""When rows of a `generate` call continue in parts, each processor treats them as in the whole batch."""

from typing import Any

import pytest
import torch
from helpers.models.engines import fused
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processing

from labkit.engine.hf.texts import GenerateTexts

ROWS, VOCAB = 6, 23
IDS = torch.randint(0, VOCAB, (ROWS, 8), generator=torch.Generator().manual_seed(2))
PADDING = torch.tensor([0, 3, 1, 0, 7, 2])
PROCESSORS: dict[str, Any] = {
    "penalty": processing.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=PADDING),
    "penalty of a prompt": processing.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=3),
    "penalty of the text": processing.EncoderRepetitionPenaltyLogitsProcessor(1.7, IDS),
    "penalty of prompts with two texts": processing.EncoderRepetitionPenaltyLogitsProcessor(1.7, IDS[::2]),
    "n-grams of the text": processing.EncoderNoRepeatNGramLogitsProcessor(1, IDS),
    "n-grams of prompts with three texts": processing.EncoderNoRepeatNGramLogitsProcessor(1, IDS[::3]),
    "n-grams": processing.NoRepeatNGramLogitsProcessor(1),
}


def texts_with(processor: Any) -> GenerateTexts:
    return GenerateTexts(
        fused("llama").new_cache(),
        own_cache=True,
        hf_cache=None,
        tokens=IDS,
        processors=LogitsProcessorList([processor]),
        criteria=StoppingCriteriaList(),
        config=GenerationConfig(),
        streamer=None,
        model_kwargs={},
    )


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_part_of_the_rows_is_processed_as_in_the_whole_batch(name: str) -> None:
    texts, scores = texts_with(PROCESSORS[name]), torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))
    whole = texts.processors(IDS, scores.clone())
    for rows in (range(3), range(3, 5), range(5, 6), range(1, 4)):
        part, cache = slice(rows.start, rows.stop), texts.cache
        assert torch.equal(texts.part(rows, cache).processors(IDS[part], scores[part].clone()), whole[part])
    assert torch.equal(texts.processors(IDS, scores.clone()), whole)


def test_rows_leave_where_no_processor_knows_them_one_by_one() -> None:
    processor = processing.RepetitionPenaltyLogitsProcessor(
        1.7, prompt_ignore_length=torch.zeros(ROWS, dtype=torch.long)
    )
    texts = texts_with(processor)
    assert texts.ends == frozenset()
    assert texts.part(range(2, 5), texts.cache).processors[0].prompt_ignore_length is None
    assert texts_with(PROCESSORS["penalty"]).ends is None
    assert texts_with(PROCESSORS["penalty of a prompt"]).ends == frozenset()


def test_a_processor_that_calls_the_model_runs_on_every_rank() -> None:
    guidance = processing.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model=None)
    assert not texts_with(guidance).wants_tokens_alone
    assert texts_with(PROCESSORS["penalty"]).wants_tokens_alone
