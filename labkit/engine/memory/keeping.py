"""Restores a cache after a failed call, so that the same call can be repeated."""

from __future__ import annotations

from torch import Tensor

from labkit.engine.memory.kv_cache import KVCache


class KeptOnError:
    """Context of a call that adds tokens to a cache. If the call fails, the cache gets back its earlier tokens, padding
    and positions. The call must not reorder rows.

    visible: the new tokens bring no mask, so that only their number has to be undone.
    """

    __slots__ = ("_cache", "_first", "_holes", "_length", "_mask")

    def __init__(self, cache: KVCache, *, visible: bool = False) -> None:
        self._cache, self._length, self._holes = cache, cache.length, cache.holes
        self._first: Tensor | None = None
        self._mask: Tensor | None = None
        if not visible and cache.first is not None:
            self._first = cache.first.clone()
            self._mask = None if cache.mask is None else cache.mask[:, : cache.length].clone()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            return
        cache, length = self._cache, self._length
        cache.crop(length - cache.length)
        if self._first is not None or not length:
            self._restore_padding(cache)

    def _restore_padding(self, cache: KVCache) -> None:
        if cache.first is not None:
            cache.first.zero_() if self._first is None else cache.first.copy_(self._first)
        if self._mask is None:
            cache.mask = None
        else:
            cache.mask = cache.all_visible() if cache.mask is None else cache.mask
            cache.mask[:, : cache.length] = self._mask
        cache.holes = self._holes
