"""A conversation as the tokens that a model was trained on: its chat template, applied."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias, cast

from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from labkit.system.errors import UserError

PROBE = "xyzzy"  # what an assistant says to find the end of its turn
LONGEST_PIECE = 80  # letters of a token and a part of the probe
Message: TypeAlias = dict[str, str]  # "role": system, user or assistant; "content": what it said


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError for a tokenizer without a chat template."""
    if tokenizer.chat_template is None:
        raise UserError(
            "got a model whose tokenizer has no chat template, expected one that was trained for conversations; "
            "labkit generate continues a text with any model"
        )


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Tensor:
    """Token ids [1, T] of the conversation, to its end and to where the answer of the model begins.

    Raises UserError for a conversation that the template refuses.
    """
    try:
        found = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except (TemplateError, ValueError) as error:
        raise UserError(
            f"the model's chat template refuses the roles {', '.join(each['role'] for each in messages)} ({error}); "
            "leave out a system prompt where it takes none, or correct the template"
        ) from error
    return cast(Tensor, found["input_ids"])


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that the chat template writes after what an assistant said; None where it is no token of its own."""
    said = [("user", "Hello"), ("assistant", PROBE), ("user", "Hello")]
    try:
        ids = render(tokenizer, [{"role": role, "content": content} for role, content in said])[0].tolist()
    except UserError:  # a template that refuses this conversation refuses the user's own, with its reason
        return None
    pieces = [str(tokenizer.decode([token])) for token in ids]
    texts = enumerate(accumulate(pieces, lambda text, piece: (text + piece)[-LONGEST_PIECE:]), 1)
    begin = next((index for index, text in texts if PROBE in text), len(ids))
    token = next((token for token, piece in zip(ids[begin:], pieces[begin:], strict=True) if piece.strip()), None)
    return token if token in tokenizer.added_tokens_decoder else None
