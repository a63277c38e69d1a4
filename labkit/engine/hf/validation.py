"""Prompts that the fused model cannot take, said before anything is computed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from labkit.system.errors import UserError, UserTypeError


def check_prompt(prompt: Any) -> None:
    """Raises TypeError for a prompt that is no tensor, ValueError for an empty one. None: there is nothing to check."""
    if prompt is None:
        return
    if not isinstance(prompt, Tensor):
        raise UserTypeError(
            f"input_ids: expected a tensor [batch, tokens], got {type(prompt).__name__}; "
            "a tokenizer makes one with return_tensors='pt', padding=True"
        )
    if prompt.numel() == 0:
        raise UserError(f"input_ids: expected at least one token, got shape {list(prompt.shape)}: the prompt is empty")


def usable_pad(pad: Any, vocabulary: int) -> int | None:
    """The token that follows a text that has ended; None: none, which is what -1 means in the configs of LLaMA.

    Raises ValueError for one that is no token of the model.
    """
    if pad is None or pad == -1:
        return None
    if not 0 <= pad < vocabulary:
        raise UserError(
            f"pad_token_id = {int(pad)}; the model's vocabulary is 0 to {vocabulary - 1}: pass the id of one of its "
            "tokens, such as eos_token_id, or None"
        )
    return int(pad)


def check_input_ids(input_ids: Tensor | None) -> Tensor:
    """The ids themselves. Raises ValueError unless they are [batch, tokens >= 1]."""
    if input_ids is None or input_ids.dim() != 2 or input_ids.numel() == 0:
        got, advice = "nothing" if input_ids is None else list(input_ids.shape), "add a batch dimension"
        if input_ids is None or input_ids.numel() == 0:
            advice = "the prompt is empty"
        raise UserError(f"input_ids: expected token ids of shape [batch, tokens >= 1], got {got}; {advice}")
    return input_ids
