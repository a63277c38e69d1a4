"""Ids of special tokens, as calls of `generate` and generation configs have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.system.errors import UserTypeError
from labkit.system.shown import shown_value

TOKEN_IDS = ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id")
ONE_ID = ("pad_token_id",)  # the others may be lists


def check_token_ids(options: Mapping[str, Any], where: str = "") -> None:
    """Raises UserTypeError for ids of special tokens that transformers makes no tensor of. None is accepted.

    where: a file or an object that has the options, for the error message.
    """
    for name in TOKEN_IDS:
        value = options.get(name)
        if not _is_id(value, one=name in ONE_ID):
            lists = "" if name in ONE_ID else ", a list of them"
            raise UserTypeError(
                f"{f'{where}: ' if where else ''}got {name} = {shown_value(value)}, expected the id of a token, such "
                f"as 5{lists} or None"
            )


def _is_id(value: Any, *, one: bool) -> bool:
    if value is None or (one and isinstance(value, int)):  # the vocabulary bounds it
        return True
    if one and not isinstance(value, Tensor) and hasattr(value, "__len__"):
        return False
    try:
        tensor = torch.as_tensor(value, dtype=torch.long)
    except (TypeError, ValueError, RuntimeError):
        return False
    return tensor.numel() == 1 or not one
