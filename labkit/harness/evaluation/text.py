"""The tokens that a model is evaluated on: of a file, or of the text that every Python brings along."""

from __future__ import annotations

import os
import pydoc_data.topics
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from labkit.system.errors import UserError
from labkit.system.output_folder import reason

MOST_OF_A_STREAM = 1 << 24  # characters of a pipe or a device
DEFAULT_TEXT = "Python's help topics"  # 65,000 words of English


def read_text(file: str | os.PathLike[str] | None) -> tuple[str, str]:
    """A text and its name: of a UTF-8 file, or of `pydoc_data.topics`. UserError for a file that cannot be read."""
    if file is None:
        return "\n".join(pydoc_data.topics.topics.values()), DEFAULT_TEXT
    path = Path(file).expanduser()
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(-1 if path.is_file() else MOST_OF_A_STREAM + 1)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no UTF-8 text (byte {error.start}); expected plain text") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from None
    if not path.is_file() and len(text) > MOST_OF_A_STREAM:
        raise UserError(f"{path} gives more than {MOST_OF_A_STREAM:,} characters, as what has no end; name a file")
    return text, path.name


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
