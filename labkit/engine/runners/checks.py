"""Refusals of steps that a model cannot run, before anything is computed."""

from __future__ import annotations

import torch

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.step import StepInput
from labkit.models.config import ModelConfig
from labkit.system.errors import UserError

MOST_POSITIONS = 2**31


def check_step(step: StepInput, config: ModelConfig) -> None:
    """Raises ValueError for tokens or positions outside of the model's range, and for a mask of the wrong shape."""
    (batch, tokens), past, ids = step.shape, step.cache.length, step.tokens
    total, mask, positions = past + tokens, step.attention_mask, step.position_ids
    if mask is not None and tuple(mask.shape) != (batch, total):
        raise UserError(
            f"attention_mask is {list(mask.shape)}; expected [{batch}, {total}], "
            f"that is {past} tokens in the cache and {tokens} new ones"
        )
    reach = step.cache.reach + tokens if mask is None else total
    if positions is not None:
        if positions.is_floating_point():
            raise UserError(f"position_ids: expected integers, got {positions.dtype}")
        if tuple(positions.shape) not in ((batch, tokens), (1, tokens)) or int(positions.min()) < 0:
            lowest = f", from {int(positions.min())} on" if positions.numel() else ""
            raise UserError(f"position_ids are {list(positions.shape)}{lowest}; expected [{batch}, {tokens}] from 0 on")
        reach = int(positions.max()) + 1
    check_reach(reach, config)
    if ids is None:
        return
    if ids.is_floating_point():
        raise UserError(f"input_ids: expected integers, got {ids.dtype}")
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0 or high >= config.vocab_size:
        raise UserError(f"token ids run from {low} to {high}; the model's vocabulary is 0 to {config.vocab_size - 1}")


def most_positions(config: ModelConfig, cache: KVCache) -> int:
    """The largest number of positions that steps which follow each other may reach in a cache."""
    learned = config.max_positions if config.position == "learned" else None
    short = None if cache.long_text else config.short_positions
    return min(MOST_POSITIONS if limit is None else limit for limit in (learned, short))


def check_reach(reach: int, config: ModelConfig) -> None:
    """Raises ValueError for more positions than a learned table has, or than the cache can count."""
    if reach > MOST_POSITIONS:
        raise UserError(
            f"the tokens reach position {reach - 1}; expected at most {MOST_POSITIONS - 1}: the cache counts in int32"
        )
    limit = config.max_positions
    if limit is not None and reach > limit and config.position == "learned":
        raise UserError(f"{reach} tokens are more than the model's {limit} positions; shorten the prompt or the output")
