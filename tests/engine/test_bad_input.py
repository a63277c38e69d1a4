"""Calls that cannot work: got, expected, what to do."""

import pytest
import torch
from engines import fused, greedy, prompt
from small_models import VOCAB
from transformers import pipeline

from labkit.models.tokenizer import byte_tokenizer


@pytest.mark.parametrize("ids", [torch.empty(1, 0, dtype=torch.long), torch.empty(0, 3, dtype=torch.long)])
def test_an_empty_prompt_is_refused(ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        fused("gpt2")(ids)
    with pytest.raises(ValueError, match="the prompt is empty"):
        greedy(fused("gpt2"), ids, 3)
    with pytest.raises(ValueError, match="the prompt is empty"):
        fused("gpt2").generate(input_ids=ids, max_new_tokens=3)


def test_no_prompt_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"input_ids: expected token ids of shape \[batch, tokens >= 1\], got nothing"):
        fused("gpt2")()
    with pytest.raises(ValueError, match="bos_token_id"):
        fused("gpt2").generate(max_new_tokens=3)


def test_a_prompt_without_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected token ids of shape \[batch, tokens >= 1\], got \[4\]"):
        fused("gpt2")(torch.tensor([1, 2, 3, 4]))


def test_lists_of_unequal_length_are_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"expected a tensor .* got list; .*return_tensors='pt', padding=True"):
        fused("gpt2").generate([[1, 2, 3], [4]], max_new_tokens=3)


@pytest.mark.parametrize("token", [-1, VOCAB, 10**9])
def test_tokens_out_of_the_vocabulary_are_refused(token: int) -> None:
    ids = torch.tensor([[5, token, 7]])
    with pytest.raises(
        ValueError, match=rf"token ids run from .*{token}.*; the model's vocabulary is 0 to {VOCAB - 1}"
    ):
        fused("gpt2")(ids)
    with pytest.raises(ValueError, match="the model's vocabulary is"):
        greedy(fused("gpt2"), ids, 3)


@pytest.mark.parametrize("shape", [(2, 8), (1, 9), (2, 10), (9,)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"attention_mask is .*; expected \[2, 9\], that is 0 tokens in the cache and 9 new"
    ):
        fused("gpt2")(prompt(2, 9), attention_mask=torch.ones(shape))


@pytest.mark.parametrize("positions", [[[-1, 0, 1]], [[0, 1]], [[0, 1, 2, 3]], [0, 1, 2], [[0, 1, 2]] * 3], ids=str)
def test_positions_that_do_not_fit_are_refused(positions: list[object]) -> None:
    with pytest.raises(ValueError, match=r"position_ids are .*, from -?\d on; expected \[2, 3\] from 0 on"):
        fused("gpt2")(prompt(2, 3), position_ids=torch.tensor(positions))


def test_tokens_that_are_no_integers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"input_ids: expected integers, got torch\.float32"):
        fused("gpt2")(torch.tensor([[1.5, 2.0]]))


def test_embeddings_instead_of_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"inputs_embeds: .* pass input_ids"):
        fused("gpt2")(inputs_embeds=torch.zeros(1, 2, 60))


def test_attention_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="keeps no attention weights; use the vanilla model"):
        fused("gpt2")(prompt(1, 4), output_attentions=True)


def test_unequal_texts_without_a_pad_token_are_refused() -> None:
    tokenizer = byte_tokenizer(300)
    tokenizer.pad_token = None
    generator = pipeline("text-generation", model=fused("gpt2").module, tokenizer=tokenizer)
    generator.model = fused("gpt2")
    generator.tokenizer.pad_token = None
    with pytest.raises(ValueError, match=r"pad_token|padding token"):
        generator(["abc", "a"], batch_size=2, max_new_tokens=3)
