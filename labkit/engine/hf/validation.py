"""Refusals of arguments that the fused model cannot use, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from labkit.models.token_ids import TOKEN_IDS, check_token_ids
from labkit.system.errors import UnsupportedError, UserError, UserTypeError

NOT_COMPUTED = {
    "head_mask": "fused attention computes every head",
    "token_type_ids": "the fused model adds no embeddings of token types",
    "encoder_hidden_states": "the fused layers attend to no encoder",
    "encoder_attention_mask": "the fused layers attend to no encoder",
}
OF_LOSS = {"num_items_in_batch", "shift_labels", "ignore_index"}  # arguments of transformers' loss besides labels
WITHOUT_EFFECT = {"token_type_ids", "cache_position"}  # passed by tokenizers and `generate`, used by some models

PAGED = (
    "keeps keys and values in pages for transformers' own attention, and the fused layers have a cache of their own; "
    "use generate with a batch of prompts and attention_mask, or the vanilla model"
)


def check_generation(options: Mapping[str, Any]) -> None:
    """Raises ValueError for options of `generate`, given by name or in its generation_config, that need transformers'
    own layers. Every other cache_implementation is computed with the engine's cache.
    """

    def option(name: str) -> Any:
        value = options.get(name)
        return getattr(options.get("generation_config"), name, None) if value is None else value

    if option("cache_implementation") == "paged":
        raise UnsupportedError(f"cache_implementation='paged' {PAGED}; or leave cache_implementation out")
    if (early_exit := option("assistant_early_exit")) is not None:
        raise UnsupportedError(
            f"assistant_early_exit={early_exit}: the fused model always runs all of its layers; leave it out, or use "
            "prompt_lookup_num_tokens or assistant_model for speculative decoding"
        )


def check_prompt(prompt: Any) -> None:
    """Raises TypeError for a prompt that is not a tensor, ValueError for an empty one. None is accepted."""
    if prompt is None:
        return
    if not isinstance(prompt, Tensor):
        raise UserTypeError(
            f"input_ids: expected a tensor [batch, tokens], got {type(prompt).__name__}; "
            "a tokenizer makes one with return_tensors='pt', padding=True"
        )
    if prompt.numel() == 0:
        raise UserError(f"input_ids: expected at least one token, got shape {list(prompt.shape)}: the prompt is empty")


def check_special_tokens(options: Mapping[str, Any], config: Any, own: Any) -> None:
    """Raises TypeError for special tokens that are no ids. An option of `generate` comes before its generation_config,
    and this before the model's `own`.
    """
    checked: set[str] = set()
    for where, values in (("", options), ("generation_config", config), ("the model's generation_config", own)):
        named = values if isinstance(values, Mapping) else {name: getattr(values, name, None) for name in TOKEN_IDS}
        present = {name: named[name] for name in TOKEN_IDS if name not in checked and named.get(name) is not None}
        check_token_ids(present, where)
        checked |= present.keys()


def usable_pad(pad: Any, vocabulary: int) -> int | None:
    """Returns the token that follows an ended text; None for None, and for -1 as in the configs of LLaMA.

    Raises ValueError for a token outside the vocabulary.
    """
    if pad is None or pad == -1:
        return None
    if not 0 <= pad < vocabulary:
        raise UserError(
            f"pad_token_id = {int(pad)}; the model's vocabulary is 0 to {vocabulary - 1}: pass the id of one of its "
            "tokens, such as eos_token_id, or None"
        )
    return int(pad)


def check_tensors(**arguments: Any) -> None:
    """Raises TypeError for arguments that are neither tensors nor None."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Tensor):
            raise UserTypeError(f"{name}: expected a tensor, got {type(value).__name__}; use torch.tensor(...)")


def check_keywords(keywords: Mapping[str, Any], *, token_types: bool) -> dict[str, Any]:
    """Returns the other keywords of `forward` that are arguments of the loss.

    Raises TypeError for a keyword that no model has, and ValueError for one that changes the output of transformers'
    model but that the fused model does not support. token_types: token_type_ids are such a keyword.
    """
    keywords = {name: value for name, value in keywords.items() if value is not None}
    if "inputs_embeds" in keywords:
        raise UserError("inputs_embeds: the fused model looks tokens up itself; pass input_ids, and not both")
    for name, reason in NOT_COMPUTED.items():
        if name in keywords and (token_types or name != "token_type_ids"):
            raise UserError(f"{name}: {reason}; leave it out, or use the vanilla model")
    unknown = sorted(set(keywords) - OF_LOSS - WITHOUT_EFFECT)
    if unknown:
        raise UserTypeError(f"forward() got an unexpected keyword argument {unknown[0]!r}; leave it out")
    return {name: value for name, value in keywords.items() if name in OF_LOSS}


def check_input_ids(input_ids: Tensor | None) -> Tensor:
    """Returns the ids. Raises ValueError unless they are [batch, tokens >= 1]."""
    if input_ids is None or input_ids.dim() != 2 or input_ids.numel() == 0:
        empty = input_ids is None or input_ids.numel() == 0
        got = "nothing" if input_ids is None else list(input_ids.shape)
        advice = "the prompt is empty" if empty else "add a batch dimension"
        raise UserError(f"input_ids: expected token ids of shape [batch, tokens >= 1], got {got}; {advice}")
    return input_ids
