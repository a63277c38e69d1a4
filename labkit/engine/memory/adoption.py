"""Caches that a caller passes in: the engine's own, or one of transformers, whose keys and values are copied into the
engine's cache and back.
"""

from __future__ import annotations

from torch import Tensor
from transformers import Cache

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.tables import counted
from labkit.kernels.int8_cache import read_heads, write_heads
from labkit.system.errors import UserError


def check_made_like(cache: KVCache, own: KVCache) -> None:
    """Raises ValueError unless the engine that made `own` also made `cache`."""
    same_types = (cache.dtype, cache.kv_dtype) == (own.dtype, own.kv_dtype)
    same_places = cache.pool is own.pool and (cache.backing_store is None) == (own.backing_store is None)
    if cache.config == own.config and same_types and same_places:
        return
    raise UserError(
        f"past_key_values was made by another engine: it holds {_kind(cache)}, this engine keeps {_kind(own)}; "
        "give the cache that this engine returned, or None for a new one"
    )


def adopt(own: KVCache, source: Cache, attention_mask: Tensor | None = None) -> None:
    """Copies the keys and values of another Hugging Face cache into an empty cache. `attention_mask` [B, at least the
    length of `source`] says which of its tokens are padding.

    A layer with a window may have kept only the last tokens, as long as they fill the window. Raises ValueError for a
    cache with another number of layers, or if tokens are missing that a layer still sees.
    """
    length, config = int(source.get_seq_length()), own.config
    if len(source.layers) != config.num_layers:
        raise UserError(f"the given cache has {len(source.layers)} layers, the model {config.num_layers}")
    own.reserve(source.layers[0].keys.shape[0], length)
    assert own.heads is not None
    layers = zip(source.layers, config.windows, own.heads.layers_in_order(range(length)), strict=True)
    for index, (layer, window, mine) in enumerate(layers):
        kept = min(layer.keys.shape[2], length)
        seen = length if window is None else min(length, window - 1)  # by the next token, which sees itself too
        if kept < seen:
            raise UserError(
                f"layer {index} of the given cache kept only {kept} of {length} tokens, and the layer sees {seen}; "
                "give a DynamicCache() without a config, which keeps all"
            )
        at = slice(length - kept, length)
        for slots, scales, theirs in (
            (mine.keys, mine.key_scales, layer.keys),
            (mine.values, mine.value_scales, layer.values),
        ):
            write_heads(slots, scales, at, theirs[:, :, :length] if theirs.shape[2] >= length else theirs)
    counting = attention_mask if config.positions_from_mask else None
    own.commit(length, None if counting is None else counted(counting[:, :length]))
    own.long_text = config.short_positions is not None and own.reach > config.short_positions


def hand_back(own: KVCache, target: Cache) -> None:
    """Appends the new tokens' keys and values to the caller's Hugging Face cache."""
    new, dim = slice(target.get_seq_length(), own.length), own.config.head_dim
    assert own.heads is not None
    for index, mine in enumerate(own.heads.layers_in_order(range(own.length, own.length))):
        stored = ((mine.keys, mine.key_scales), (mine.values, mine.value_scales))
        keys, values = (read_heads(*pair, new, dim).to(own.dtype) for pair in stored)
        target.update(keys, values, index)


def _kind(cache: KVCache) -> str:
    config, location = cache.config, str(cache.device)
    heads = f"{config.num_kv_heads} heads of {config.head_dim}"
    if cache.backing_store is not None:
        location = cache.backing_store.name
    elif cache.pool is None:
        location = "the CPU"
    return f"{config.num_layers} layers of {config.architecture}, {heads}, {cache.types} on {location}"
