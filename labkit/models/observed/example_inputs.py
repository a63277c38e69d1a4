"""Inputs for a run of a model that only shows what its modules do: a few tokens, and one more after them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from labkit.system.errors import UserError


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which a model neither trains nor keeps gradients. Its modules keep their modes afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def token_inputs(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments of the model's forward: a few sequences of tokens, with padding on the left. Raises UserError
    for a model that does not take tokens.
    """
    config: Any = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    if config is None or main != "input_ids":
        takes = "it has no config" if config is None else f"it takes {main}"
        raise UserError(
            f"{type(model).__name__} can't be run on tokens ({takes}); pass example=, keyword arguments of its forward"
        )
    numbers = set(_numbers(config.to_dict()))
    # sizes that the config doesn't contain, so that they can't be taken for a number of heads
    batch, encoder, decoder = itertools.islice((size for size in itertools.count(3, 2) if size not in numbers), 3)
    device = next(model.parameters()).device
    inputs = {"input_ids": _tokens(config, batch, encoder, device)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, :2] = 0  # left padding
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = _tokens(config, batch, decoder, device)
    return inputs


def _tokens(config: Any, batch: int, length: int, device: torch.device) -> Tensor:
    vocabulary = getattr(config.get_text_config(), "vocab_size", 0) or 100
    low = min(5, vocabulary - 1)  # above the usual special tokens: RoBERTa derives positions from the padding token
    generator = torch.Generator().manual_seed(length)
    return torch.randint(low, vocabulary, (batch, length), generator=generator).to(device)


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)


def next_inputs(model: nn.Module, inputs: Mapping[str, Tensor], output: Any) -> dict[str, Any] | None:
    """Returns inputs for one more token after `output`'s KV cache; None: the model has no cache."""
    past = getattr(output, "past_key_values", None)
    if past is None or "past_key_values" not in inspect.signature(model.forward).parameters:
        return None
    mask = inputs["attention_mask"]
    if "decoder_input_ids" in inputs:
        return {**inputs, "decoder_input_ids": inputs["decoder_input_ids"][:, :1], "past_key_values": past}
    longer = torch.cat([mask, mask[:, -1:]], 1)
    return {"input_ids": inputs["input_ids"][:, -1:], "attention_mask": longer, "past_key_values": past}
