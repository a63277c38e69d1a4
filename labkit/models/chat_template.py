"""Applies a model's chat template: turns a conversation into the tokens that the model was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias, cast

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from labkit.models.bounded_call import BoundedCallError, bounded_call
from labkit.system.errors import UserError
from labkit.system.shown import shown

PROBE = "xyzzy"  # answer of a made-up assistant, to find the token that ends its turn
LONGEST_PIECE = 80  # letters of decoded text that are searched for the probe
Message: TypeAlias = dict[str, str]  # "role": system, user or assistant; "content": what it said


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError for a tokenizer without a chat template."""
    if tokenizer.chat_template is None:
        raise UserError(
            "got a model whose tokenizer has no chat template, expected one that was trained for conversations; "
            "labkit generate continues a text with any model"
        )


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Tensor:
    """Token ids [1, T] of the whole conversation, up to where the model's answer begins.

    A template is a program that came with the model. It runs in a process of its own, in bounded time and memory.
    Raises UserError for a conversation that the template refuses, and for a template that fails in any other way.
    """
    conversation = list(messages)
    roles = ", ".join(message["role"] for message in conversation)
    try:
        text = bounded_call(
            lambda: str(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False))
        )
    except BoundedCallError as error:
        raise UserError(
            f"the model's chat template refuses the roles {roles} ({shown(str(error))}); leave out a system prompt if "
            "it takes none, or correct the template"
        ) from error
    ids = cast(Tensor, tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"])
    if not ids.shape[1]:
        raise UserError(f"the model's chat template writes no token for the roles {roles}; correct the template")
    return ids


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that the chat template writes after an assistant's answer; None: it writes no special token there."""
    conversation = [("user", "Hello"), ("assistant", PROBE), ("user", "Hello")]
    try:
        ids = render(tokenizer, [{"role": role, "content": content} for role, content in conversation])[0].tolist()
    except UserError:  # the user's own conversation will be refused too, with the template's reason
        return None
    pieces = [str(tokenizer.decode([token])) for token in ids]
    texts = enumerate(accumulate(pieces, lambda text, piece: (text + piece)[-LONGEST_PIECE:]), 1)
    begin = next((index for index, text in texts if PROBE in text), len(ids))
    token = next((token for token, piece in zip(ids[begin:], pieces[begin:], strict=True) if piece.strip()), None)
    return token if token in tokenizer.added_tokens_decoder else None
