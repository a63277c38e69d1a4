"""The byte-level tokenizer of models without a vocabulary of their own."""

import pytest
from helpers.models.small_models import VOCAB

from labkit.models.tokenizer import END_OF_TEXT, byte_tokenizer


@pytest.mark.parametrize("vocab_size", [257, 300, 50257])
def test_the_byte_tokenizer_knows_every_text_and_every_id(vocab_size: int) -> None:
    tokenizer = byte_tokenizer(vocab_size)
    text = "Hello, wörld!\n\t日本 🙂  "
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == vocab_size
    texts = [tokenizer.decode([index]) for index in range(vocab_size)]
    assert all(piece and (piece.isprintable() or piece in "\n\t") for piece in texts)
    assert len(set(texts[END_OF_TEXT:])) == vocab_size - END_OF_TEXT


def test_the_byte_tokenizer_pads_on_the_left() -> None:
    padded = byte_tokenizer(300)(["a", "bcd"], padding=True)
    assert padded["input_ids"] == [[END_OF_TEXT, END_OF_TEXT, 97], [98, 99, 100]]
    assert padded["attention_mask"] == [[0, 0, 1], [1, 1, 1]]


def test_a_vocabulary_that_cannot_hold_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 257 ids, got a vocabulary of 131"):
        byte_tokenizer(VOCAB)
