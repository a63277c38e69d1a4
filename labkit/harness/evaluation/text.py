"""The tokens that a model is evaluated on: of a file, or of the text that every Python brings along."""

from __future__ import annotations

import os
import pydoc_data.topics

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from labkit.system.errors import UserError
from labkit.system.home import expanded
from labkit.system.output_folder import reason

DEFAULT_TEXT = "Python's help topics"  # 65,000 words of English


def read_text(file: str | os.PathLike[str] | None) -> tuple[str, str]:
    """A text and its name: of a UTF-8 file, or of `pydoc_data.topics`. UserError for a file that cannot be read."""
    if file is None:
        return "\n".join(pydoc_data.topics.topics.values()), DEFAULT_TEXT
    path = expanded(file)
    try:
        return path.read_text(encoding="utf-8"), path.name
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no UTF-8 text (byte {error.start}); expected plain text") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from None


def encode(text: str, tokenizer: PreTrainedTokenizerBase, *, vocab: int, most: int, least: int) -> Tensor:
    """The first tokens of a text, `most` of them or as many as there are: int64 [tokens].

    UserError for a text of fewer than `least` tokens, and for a tokenizer with tokens that the model does not have.
    """
    ids = tokenizer(text[: _enough(most)], add_special_tokens=False, verbose=False)["input_ids"][:most]
    if len(ids) < least:
        raise UserError(f"got a text of {len(ids)} tokens, expected at least {least}, a window; use a longer text")
    if (highest := max(ids)) >= vocab:
        raise UserError(
            f"the tokenizer gives token {highest}, but the model has {vocab} tokens: it is another model's tokenizer"
        )
    return torch.tensor(ids)


def _enough(tokens: int) -> int:
    """Characters that certainly make so many tokens: none in use takes 32 characters on average."""
    return 32 * tokens
