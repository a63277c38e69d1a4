"""Tokens of the text on which a model is evaluated: a file, or the text that every Python contains."""

from __future__ import annotations

import os
import pydoc_data.topics

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from labkit.system.errors import UserError
from labkit.system.home import expanded
from labkit.system.input_file import read_stream
from labkit.system.output_folder import reason

MOST_OF_A_STREAM = 1 << 24  # bytes of a pipe or a device
DEFAULT_TEXT = "Python's help topics"  # 65,000 words of English
LEAST = 2  # tokens of a text: the first one predicts the second
MARGIN = 16  # tokens at the end of a part of a text that the whole text may tokenize differently


def read_text(file: str | os.PathLike[str] | None) -> tuple[str, str]:
    """A text and its name: of a UTF-8 file, or of `pydoc_data.topics`. UserError for a file that cannot be read."""
    if file is None:
        return "\n".join(pydoc_data.topics.topics.values()), DEFAULT_TEXT
    path = expanded(file)
    try:
        content = read_stream(path, MOST_OF_A_STREAM + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from None
    if not path.is_file() and len(content) > MOST_OF_A_STREAM:
        raise UserError(f"{path} gives more than {MOST_OF_A_STREAM:,} bytes and may never end; name a file")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no UTF-8 text (byte {error.start}); expected plain text") from None
    return text.replace("\r\n", "\n").replace("\r", "\n"), path.name


def encode(text: str, tokenizer: PreTrainedTokenizerBase, *, vocab: int, most: int) -> Tensor:
    """The first `most` tokens of a text, or all of a shorter one: int64 [tokens].

    UserError for a text of fewer than LEAST tokens, and for a tokenizer with tokens that the model does not have.
    """
    ids = _first_tokens(text, tokenizer, most)
    if len(ids) < LEAST:
        raise UserError(f"got a text of {len(ids)} tokens, expected at least {LEAST}; use a longer text")
    if (highest := max(ids)) >= vocab:
        raise UserError(
            f"the tokenizer gives token {highest}, but the model has {vocab} tokens: it is another model's tokenizer"
        )
    return torch.tensor(ids)


def beginning_of(tokenizer: PreTrainedTokenizerBase, *, wanted: bool | None) -> int | None:
    """The token that begins a text; None: no token. `wanted`: whether a text begins with one; None: if the tokenizer
    puts one there.

    UserError where one is wanted and the tokenizer has none.
    """
    token: int | None = tokenizer.bos_token_id
    if wanted and token is None:
        raise UserError("got bos=True, but the tokenizer has no beginning-of-text token; leave bos out")
    if wanted is None:
        plain, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
        wanted = token is not None and whole[: len(whole) - len(plain)][:1] == [token]
    return token if wanted else None


def _first_tokens(text: str, tokenizer: PreTrainedTokenizerBase, most: int) -> list[int]:
    """The first `most` tokens. Reads more and more of the text, because one token may stand for a long run of a
    character.
    """
    characters = 32 * (most + MARGIN)
    while True:
        ids: list[int] = tokenizer(text[:characters], add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= most + MARGIN or characters >= len(text):
            return ids[:most]
        characters *= 4
