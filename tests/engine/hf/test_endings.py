"""The engine ends each text at the token at which transformers' criteria end it."""

from itertools import product
from time import time
from typing import Any

import pytest
import torch
from helpers.models.engines import fused, prompt, vanilla
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import GenerationConfig, PreTrainedTokenizerFast, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria

from labkit.engine.hf.endings import _AskedEndings, _KnownEndings, endings_of

LETTERS = "abc"
TEXTS = [*("".join(letters) for size in (1, 2, 3) for letters in product(LETTERS, repeat=size)), *"def", "é", "ab é"]
CPU, LENGTH, BATCH = torch.device("cpu"), 12, 3


def tokenizer_of(decoder: Any) -> PreTrainedTokenizerFast:
    """A vocabulary in which many tokens can begin, continue and end a stop string."""
    tokenizer = Tokenizer(BPE({text: token for token, text in enumerate(TEXTS)}, []))
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def padded_with(token: int) -> GenerationConfig:
    """A configuration as `generate` prepares it."""
    config = GenerationConfig(pad_token_id=token)
    config._pad_token_tensor = torch.tensor(token)
    return config


TOKENIZERS = {"characters": tokenizer_of(decoders.Fuse()), "bytes": tokenizer_of(decoders.ByteLevel())}
WORDS = st.text(LETTERS, min_size=1, max_size=5)
TOKENS = st.lists(
    st.lists(st.integers(0, len(TEXTS) + 3), min_size=LENGTH, max_size=LENGTH), min_size=BATCH, max_size=BATCH
)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_rows_end_where_the_criteria_say(name: str) -> None:
    ends: list[int] = []

    @settings(max_examples=100, derandomize=True, deadline=None, database=None)
    @given(st.lists(WORDS, min_size=1, max_size=3), TOKENS, st.sets(st.integers(0, len(TEXTS) - 1), max_size=2))
    def check(words: list[str], rows: list[list[int]], eos: set[int]) -> None:
        criteria = StoppingCriteriaList(
            [MaxLengthCriteria(LENGTH), StopStringCriteria(TOKENIZERS[name], words)]
            + ([EosTokenCriteria(sorted(eos))] if eos else [])
        )
        known = endings_of(BATCH, criteria, padded_with(1), CPU)
        asked = _AskedEndings(criteria, torch.tensor(1), torch.ones(BATCH, dtype=torch.bool))
        assert isinstance(known, _KnownEndings)
        tokens, ended = torch.empty(BATCH, 0, dtype=torch.int64), False
        for column in torch.tensor(rows).T:
            following = asked.padded(column.clone())
            assert torch.equal(known.padded(column.clone()), following)
            tokens = torch.cat((tokens, following[:, None]), dim=1)
            ended = asked.have_ended(tokens, None)
            assert known.have_ended(tokens, None) is ended
            if tokens.shape[1] < LENGTH:
                assert known.ended == {row for row in range(BATCH) if not asked.unfinished[row]}
            if ended:
                ends.append(tokens.shape[1])
                break
        assert ended

    check()
    assert len(set(ends)) > 6


def test_a_time_ends_all_texts_at_once() -> None:
    def ended(begun: float) -> bool:
        criteria = StoppingCriteriaList([MaxLengthCriteria(LENGTH), MaxTimeCriteria(10.0, begun)])
        endings = endings_of(2, criteria, padded_with(0), CPU)
        assert isinstance(endings, _KnownEndings)
        return endings.have_ended(torch.ones(2, 3, dtype=torch.int64), None)

    assert not ended(time())
    assert ended(time() - 11)


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("eos", [None, 3])
def test_texts_that_stop_at_strings_equal_vanilla(samples: bool, eos: int | None) -> None:
    """Without a token that ends texts, texts that have stopped go on until all have, as in transformers."""
    options: dict[str, Any] = {
        "tokenizer": TOKENIZERS["characters"],
        "stop_strings": ["ab", "ca", "bcb"],
        "max_new_tokens": 40,
        "do_sample": samples,
        "pad_token_id": 0,
        "eos_token_id": eos,
    }
    texts = []
    for model in (vanilla("gpt2"), fused("gpt2")):
        torch.manual_seed(1)
        texts.append(model.generate(prompt(3, 6) % len(TEXTS), **options))
    assert torch.equal(*texts)
