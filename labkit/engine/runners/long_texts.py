"""Models with other rotary frequencies for long texts: all keys in a cache are rotated for the same length.

Phi-4-mini has one set of frequencies for up to 4,096 positions and one for more. The longest text of a batch decides
for all of them, as in transformers. A text that grows beyond the first length is computed anew.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from labkit.engine.memory.tables import counted
from labkit.engine.runners.step import StepInput
from labkit.system.errors import UserError


def choose_rotation(step: StepInput) -> None:
    """Chooses the frequencies for the first tokens in a cache. Raises UserError for a later step that needs others."""
    cache = step.cache
    if (short := cache.config.short_positions) is None:
        return
    if outgrows(step):
        shorter, longer = f"at most {short} tokens", f"more than {short} tokens"
        made_for, needed = (longer, shorter) if cache.long_text else (shorter, longer)
        raise UserError(
            f"position {_reach(step) - 1} needs the rotation for texts of {needed}, but the {cache.length} tokens in "
            f"the cache are rotated for {made_for}; give the whole text at once and without past_key_values, or use "
            "generate, which computes it anew"
        )
    if not cache.length:
        cache.long_text = _reach(step) > short


def outgrows(step: StepInput) -> bool:
    """Whether a step needs other frequencies than the keys in its cache. Ended rows may leave a batch of long texts, so
    a step that follows another one may be short.
    """
    cache, short = step.cache, step.cache.config.short_positions
    if short is None or not cache.length or (step.follows and cache.long_text):
        return False
    return (_reach(step) > short) is not cache.long_text


def begun_anew(step: StepInput, text: Callable[[], Tensor]) -> StepInput:
    """Returns the step. If it outgrows its cache, empties the cache and returns the step of all tokens. If that step
    fails, the cache stays empty.

    text: returns the tokens in the cache, followed by the step's tokens, int64 [B, T]. If it does not know the first
    of them, the step stays, and the runner refuses it.
    """
    if not outgrows(step):
        return step
    tokens, cache, past = text(), step.cache, step.cache.length
    batch, total = step.shape[0], past + step.shape[1]
    if tokens.shape[1] != total:
        return step
    cache.reserve(batch, total)
    assert cache.positions is not None
    mask, positions = step.attention_mask, cache.positions[:, :total].clone()
    if step.position_ids is not None:
        positions[:, past:] = step.position_ids
    if mask is None and cache.mask is not None:
        mask = cache.mask[:, :total].clone()
    cache.reset()
    return step._replace(tokens=tokens, attention_mask=mask, position_ids=positions, follows=False, ahead=None)


def _reach(step: StepInput) -> int:
    """1 + the largest position of the new tokens, as `KVCache.place` counts them."""
    cache, mask, positions = step.cache, step.attention_mask, step.position_ids
    if step.follows:
        return cache.reach + 1
    if positions is not None and cache.config.takes_position_ids:
        return int(positions.max()) + 1
    if not cache.config.positions_from_mask:
        return cache.length + step.shape[1]
    if mask is None:
        return cache.reach + step.shape[1]
    return 1 + int(counted(mask)[:, cache.length :].max())
